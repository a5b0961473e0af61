"""Compiled tokenisers give the library's ids, whatever the text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenization.exact import assert_same, vocabulary
from tests.tokenization.files import FORMS, ONE_EACH, REAL_FORMS, SHARED, SMALL_FORMS, both
from tests.tokenization.strings import corpora, every_block, of_few_letters, run_together, strange


@pytest.mark.parametrize("form", FORMS)
def test_strange_strings(form: str) -> None:
    """5000 of each algorithm, over the files that have it."""
    ours, library = both(form)
    share = 5000 // list(FORMS.values()).count(FORMS[form]) + 1
    assert_same(ours, library, strange(share, list(FORMS).index(form), vocabulary(library)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_many_strange_strings(form: str) -> None:
    ours, library = both(form)
    for seed in range(10):
        assert_same(ours, library, strange(10_000, 100 + seed, vocabulary(library)))


@pytest.mark.parametrize("form", FORMS)
def test_unicode_blocks(form: str) -> None:
    """Those up to U+33FF whole, of the rest a sample; of files beside one that has this a sample of all."""
    ours, library = both(form)
    blocks, step = list(every_block()), 1 if form in ONE_EACH or form in REAL_FORMS else 4
    assert_same(ours, library, blocks[: 3 * 0x34 : step] + blocks[3 * 0x34 :: 61 * step])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_every_unicode_block(form: str) -> None:
    ours, library = both(form)
    assert_same(ours, library, every_block())


@pytest.mark.parametrize("form", FORMS)
def test_corpora_in_many_languages(form: str) -> None:
    if not (SHARED / "data").is_dir():
        pytest.skip("no data sets beside the checkout")
    ours, library = both(form)
    assert_same(ours, library, corpora(SHARED / "data")[:: 9 if form in REAL_FORMS else 27])


@pytest.mark.long
@pytest.mark.parametrize("form", REAL_FORMS)
def test_all_of_the_corpora(form: str) -> None:
    if not (SHARED / "data").is_dir():
        pytest.skip("no data sets beside the checkout")
    assert_same(*both(form), corpora(SHARED / "data"))


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_behind_words(form: str) -> None:
    """Also bytes that no word has, where a search must end."""
    ours, library = both(form)
    words = vocabulary(library)[::40]
    assert_same(ours, library, [chr(byte).join([word, word]) for word in words for byte in range(0, 256, 5)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("max_tokens", [3, 20])
def test_ends_are_those_of_the_whole(form: str, max_tokens: int) -> None:
    ours, library = both(form)
    words = [word.strip() for word in vocabulary(library)[::7]]
    letters = random.Random(4).choices(
        [*words, "the", "I'll", "a\nb", "<s>", "'s", "e\u0301", "字"], k=12_000
    )
    texts = [" ".join(letters[at : at + 100]) for at in range(0, len(letters), 100)] + ["", "x", "y" * 999]
    texts += [
        between.join(["人人生而自由", "すべての人間", "모든 사람은"] * 40)
        for between in ("。", "、", " ", "\n")
    ]
    for own, other in zip(ours.encode_ends(texts, max_tokens), library.encode(texts), strict=True):
        cut = [ours.special_tokens.truncate(row, max_tokens, keep_end=True).tolist() for row in (own, other)]
        assert cut[0] == cut[1]
        assert len(own) == len(other) or len(own) >= max_tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("max_tokens", [None, 40])
def test_words_longer_than_any_buffer(form: str, max_tokens: int | None) -> None:
    """What is sure of such a word is written before its end is read."""
    ours, library = both(form)
    words = vocabulary(library)
    texts = [*run_together(3, 3, words), *of_few_letters(words, 9_000)]
    assert_same(ours, library, texts, max_tokens)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), form=st.sampled_from([*SMALL_FORMS]))
def test_any_text(text: str, form: str) -> None:
    ours, library = both(form)
    assert_same(ours, library, [text])


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_spelled_out(form: str) -> None:
    ours, library = both(form)
    texts = [
        "<s>",
        "a <s> b",
        "<mask>",
        "x  <mask> y",
        "</s></s>",
        "<unk>",
        "en_XX",
        "a<unk>é<unk>",
        "<s",
        "<pad>",
    ]
    assert_same(ours, library, texts)
    if form in SMALL_FORMS:
        assert_same(ours.literal(), library.literal(), texts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 50])
def test_cut_while_reading_is_cut_afterwards(form: str, max_tokens: int) -> None:
    ours, library = both(form)
    texts = ["", "a", "the quick brown fox " * 40, "x" * 500, "a <s> b", "é ほげ " * 30]
    own, other = ours.encode(texts, max_tokens), library.encode(texts, max_tokens)
    assert [row.tolist() for row in own] == [row.tolist() for row in other]
