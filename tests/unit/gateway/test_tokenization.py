"""The tokenizer interface on real files: no hidden limits, the template, and where the work runs."""

from __future__ import annotations

import asyncio
import json
import lzma
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from gateway.tokenization.base import SpecialTokens
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.pool import TokenizerPool
from rose.batch import Int32
from rose.errors import ModelLoadError

TEMPLATES = {
    "both ends": ("<s> <s> $A </s>", 2, 1),
    "end only": ("$A </s>", 0, 1),
    "start only": ("<s> $A", 1, 0),
    "none": ("$A", 0, 0),
}


def backend(template: str) -> Tokenizer:
    """Words w0, w1, ... are the ids 0, 1, ...; <s> is 50, </s> is 51."""
    words = {f"w{number}": number for number in range(50)} | {"a": 52, "<s>": 50, "</s>": 51}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 50), ("</s>", 51)]
    )
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_read_from_the_file(name: str) -> None:
    template, before, after = TEMPLATES[name]
    special = HuggingFaceTokenizer(backend(template)).special_tokens
    assert special.prefix.tolist() == [50] * before
    assert special.suffix.tolist() == [51] * after


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("max_tokens", [4, 5, 9, 13, 14])
def test_truncating_ids_is_what_the_library_would_have_done(name: str, max_tokens: int) -> None:
    template = TEMPLATES[name][0]
    text = " ".join(f"w{number}" for number in range(10))
    reference = backend(template)
    reference.enable_truncation(max_tokens)
    tokenizer = HuggingFaceTokenizer(backend(template))
    [ids] = tokenizer.encode([text])
    cut = tokenizer.special_tokens.truncate(ids, max_tokens)
    assert cut.tolist() == reference.encode(text).ids
    assert cut.dtype == np.int32


def test_a_limit_below_the_template_still_holds() -> None:
    special = SpecialTokens(np.array([1, 2], np.int32), np.array([3], np.int32))
    assert len(special.truncate(np.arange(9, dtype=np.int32), 2)) == 2


def test_limits_and_padding_in_the_file_are_switched_off() -> None:
    limited = backend("<s> $A </s>")
    limited.enable_truncation(4)
    limited.enable_padding(length=64)
    rows = HuggingFaceTokenizer(limited).encode(["w1 w2 w3 w4 w5 w6", "w1"])
    assert [row.tolist() for row in rows] == [[50, 1, 2, 3, 4, 5, 6, 51], [50, 1, 51]]


def test_vocab_size_covers_every_id() -> None:
    tokenizer = backend("$A")
    tokenizer.add_tokens(["new"])
    assert HuggingFaceTokenizer(tokenizer).vocab_size == 54


def test_one_call_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counting:
        def __init__(self, real: Tokenizer) -> None:
            self._real = real

        def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
            calls.append(len(texts))
            return self._real.encode_batch_fast(texts, **options)

    tokenizer = HuggingFaceTokenizer(backend("$A"))
    monkeypatch.setattr(tokenizer, "_backend", Counting(backend("$A")))
    assert len(tokenizer.encode(["w1"] * 32)) == 32
    assert calls == [32]


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        HuggingFaceTokenizer.from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_minilm_tokenises_beyond_its_file_s_128(minilm_folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer.from_file(minilm_folder / "tokenizer.json")
    [short, long] = tokenizer.encode(["Hello, world!", "hello " * 400])
    assert short.tolist() == [101, 7592, 1010, 2088, 999, 102]
    assert len(long) == 402
    assert tokenizer.vocab_size == 30_522


def test_xlm_roberta_ids(shared_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(
        lzma.decompress((shared_folder / "tokenizers" / "xlm-roberta-unigram.json.xz").read_bytes())
    )
    tokenizer = HuggingFaceTokenizer.from_file(path)
    [ids] = tokenizer.encode(["Hello, world!"])
    assert ids.tolist() == [0, 35378, 4, 8999, 38, 2]
    assert tokenizer.special_tokens.truncate(ids, 4).tolist() == [0, 35378, 4, 2]


class Recording:
    """A tokenizer that notes where it runs."""

    vocab_size, speedup = 10, 1
    special_tokens = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        self.threads.append(threading.current_thread())
        assert self.gate.wait(10)
        return [np.full(len(text), 1, np.int32) for text in texts]


async def test_short_jobs_run_on_the_loop_and_long_ones_beside_it() -> None:
    tokenizer = Recording()
    pool = TokenizerPool(tokenizer, threads=2, inline_chars=10)
    await pool.encode(["12345", "12345"])
    await pool.encode(["12345", "123456"])
    here, there = tokenizer.threads
    assert here is threading.main_thread()
    assert there is not here
    pool.close()


async def test_a_huge_job_is_cut_into_calls_and_stays_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tokenization.pool._PART_CHARS", 10)
    tokenizer = Recording()
    pool = TokenizerPool(tokenizer, threads=2, inline_chars=0)
    for lengths, calls in (([4, 6, 1, 10, 11, 3, 3, 3], 5), ([30], 1), ([1] * 10, 1), ([10, 10], 2)):
        tokenizer.threads.clear()
        rows = await pool.encode(["x" * length for length in lengths])
        assert [len(row) for row in rows] == lengths
        assert len(tokenizer.threads) == calls
    pool.close()


async def test_the_loop_turns_while_a_long_text_is_tokenised() -> None:
    tokenizer = Recording()
    tokenizer.gate.clear()
    pool = TokenizerPool(tokenizer, threads=1, inline_chars=0)
    job = asyncio.ensure_future(pool.encode(["long"]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not job.done()
    tokenizer.gate.set()
    [ids] = await job
    assert len(ids) == 4
    pool.close()


async def test_a_cancelled_job_that_waits_for_a_thread_is_never_tokenised() -> None:
    tokenizer = Recording()
    tokenizer.gate.clear()
    pool = TokenizerPool(tokenizer, threads=1, inline_chars=0)
    running = asyncio.ensure_future(pool.encode(["first"]))
    waiting = asyncio.ensure_future(pool.encode(["second"]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    tokenizer.gate.set()
    await running
    await pool.encode(["third"])
    assert len(tokenizer.threads) == 2
    pool.close()


def folder_with(folder: Path, template: str, **files: dict[str, object]) -> Path:
    """A tokenizer.json in `folder`, and files beside it by their names without ".json"."""
    backend(template).save(str(folder / "tokenizer.json"))
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "lstrip": False}])
def test_texts_end_where_only_the_settings_say_so(tmp_path: Path, name: str, end: object) -> None:
    """As e5-mistral's files have it, whose last token is its vector."""
    settings = {"add_eos_token": True, "eos_token": end}
    path = folder_with(tmp_path, TEMPLATES[name][0], tokenizer_config=settings)
    tokenizer = HuggingFaceTokenizer.from_file(path)
    assert tokenizer.encode(["w1 w2"])[0].tolist() == [50] * TEMPLATES[name][1] + [1, 2, 51]
    assert tokenizer.special_tokens.suffix.tolist() == [51]
    assert tokenizer.literal().encode(["w1"])[0].tolist()[-2:] == [1, 51]
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoTokenizer.from_pretrained(
        tmp_path, add_eos_token=True, add_bos_token=TEMPLATES[name][1] > 0, bos_token="<s>", eos_token="</s>"
    )
    if TEMPLATES[name][1] < 2:  # transformers' own template has one token at the start
        assert own("w1 w2")["input_ids"] == tokenizer.encode(["w1 w2"])[0].tolist()


@pytest.mark.parametrize(
    ("names", "types"),
    [
        (None, (0, 0, 0, 1, 1)),
        (["input_ids", "token_type_ids", "attention_mask"], (0, 0, 0, 1, 1)),
        (["input_ids", "attention_mask"], (0, 0, 0, 0, 0)),
    ],
)
def test_types_are_those_that_the_settings_let_through(
    tmp_path: Path, names: list[str] | None, types: tuple[int, ...]
) -> None:
    words = backend("$A")
    special = [("<s>", 50), ("</s>", 51)]
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=special
    )
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {} if names is None else {"model_input_names": names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HuggingFaceTokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.pair_tokens.types == tokenizer.literal().pair_tokens.types == types


def test_byte_level_offsets_stay_when_an_end_is_added(tmp_path: Path) -> None:
    words = backend("$A")
    words.post_processor = processors.ByteLevel(trim_offsets=True)
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_eos_token": True, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    [tokens] = HuggingFaceTokenizer.from_file(tmp_path / "tokenizer.json").tokens(["w1"], special_tokens=True)
    assert [(token.id, token.text) for run in tokens.runs for token in run] == [(1, "w1"), (51, "</s>")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"add_eos_token": True, "eos_token": "<end>"}}, "'<end>' is not in the vocab"),
        ({"tokenizer_config": {"add_eos_token": True}}, "'None' is not in the vocabulary"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case true is not supported"),
    ],
)
def test_what_the_neighbours_ask_in_vain_is_named(
    tmp_path: Path, files: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        HuggingFaceTokenizer.from_file(folder_with(tmp_path, "$A", **files))


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Lowercase(),
        normalizers.BertNormalizer(),
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
    ],
)
def test_a_tokenizer_that_lower_cases_does_what_is_asked(tmp_path: Path, normalizer: object) -> None:
    words = backend("$A")
    words.normalizer = normalizer
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert HuggingFaceTokenizer.from_file(tmp_path / "tokenizer.json").encode(["W1"])[0].tolist() == [1]
