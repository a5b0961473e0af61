"""What `server.py verify` reads to a model."""

from __future__ import annotations

# A dozen scripts; one word, one sentence, one page; what tokenizers stumble over. None begins or ends with a
# blank: sentence-transformers strips those, a server does not.
TEXTS: tuple[str, ...] = (
    "a",
    "Hello, world!",
    "What is the capital of France?",
    "THE QUICK BROWN FOX, the quick brown fox; The Quick Brown Fox.",
    "Der Fluss führt im Frühling mehr Wasser als im Spätsommer, weil oben der Schnee schmilzt.",
    "Où se trouve la bibliothèque municipale, s'il vous plaît ?",
    "El niño comió una manzana y después se durmió bajo el árbol.",
    "Проверка того, что вектор предложения не зависит от соседей по пакету.",
    "今天的天气很好，我们去公园散步吧。",
    "吾輩は猫である。名前はまだ無い。",
    "오늘은 비가 와서 집에서 책을 읽었습니다.",
    "القطار يصل إلى المحطة في الساعة الثامنة صباحا.",
    "השמש זורחת מעל הים בשעת בוקר מוקדמת.",
    "नदी के किनारे बैठकर बच्चे पत्थर फेंक रहे थे।",
    "วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนสาธารณะกันเถอะ",
    "Η θάλασσα ήταν ήρεμη και ο ουρανός καθαρός.",
    "İstanbul'da ılık bir akşamüstü, çay bahçesinde oturuyorduk.",
    "Trời hôm nay đẹp quá, chúng ta đi dạo công viên nhé.",
    "Cafe\u0301 or café: one accent, two spellings; ﬁne ligatures, ½ and ²; full-width ＡＢＣ１２３.",
    "🙂 Emoji 👩‍👩‍👧‍👦 in a row 🇩🇪🇯🇵, and a zero\u200bwidth space.",
    "def norm(x: list[float]) -> float:\n    return sum(v * v for v in x) ** 0.5\n\nprint(norm([3.0]))",
    '{"id": 1234567890, "price": 3.14159, "tags": ["a", "b"], "ok": true, "none": null}',
    "https://example.org/path/to/page?query=embedding&lang=en#section-2 and user@example.org",
    "tabs\tand\nnewlines\r\nand    many     spaces",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft llanfairpwllgwyngyll",
    " ".join(
        f"Sentence {number} of a text that is longer than any attention window." for number in range(40)
    ),
    "水" * 200,
)
