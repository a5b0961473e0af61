"""The search over whole layers, on a CPU: every way computes the same, and the fastest is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import torch

from rose.aot.products import Epilogue
from rose.attention.base import AttentionBackend, AttentionSpec
from rose.attention.sdpa import SdpaAttention
from rose.kernels.early import Early
from rose.kernels.fused import TABLE_PATH, read_table
from rose.layers import decoder_case, encoder_case, layer_case, layer_table, projection, tune_layers
from rose.layers.decoder_case import DecoderCase
from rose.layers.layer_case import Case, Places, Sequences, Way
from tests.unit.kernels.fused_fake import fake_gemm

TOKENS = 24
BATCH = Sequences(1, TOKENS)


def built(epilogue: Epilogue, most: int = 0) -> list[str | None]:
    return [
        f"gemm-{epilogue}-64x64-cooperative-1x1",
        f"gemm-{epilogue}-128x64x128-cooperative-1x2-early",
    ]


def backends_of(spec: AttentionSpec, names: Collection[str]) -> dict[str, AttentionBackend]:
    return {"fa4": SdpaAttention(spec), "fa4-64x128-early": SdpaAttention(spec)}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    monkeypatch.setattr(layer_case, "load", fake_gemm)
    for module in (decoder_case, encoder_case):
        monkeypatch.setattr(module, "built", built)
        monkeypatch.setattr(module, "backends_of", backends_of)
    monkeypatch.setattr(decoder_case.DecoderCase, "num_layers", 3)
    monkeypatch.setattr(decoder_case.DecoderCase, "hidden", 128)
    monkeypatch.setattr(decoder_case.DecoderCase, "inner", 192)
    monkeypatch.setattr(decoder_case.DecoderCase, "heads", 2)
    monkeypatch.setattr(decoder_case.DecoderCase, "kv_heads", 1)
    monkeypatch.setattr(encoder_case.EncoderCase, "num_layers", 3)
    monkeypatch.setattr(encoder_case.EncoderCase, "hidden", 128)
    monkeypatch.setattr(encoder_case.EncoderCase, "inner", 256)
    monkeypatch.setattr(encoder_case.EncoderCase, "heads", 2)


@pytest.mark.parametrize("batch", [BATCH, Sequences(3, 8)], ids=str)
@pytest.mark.parametrize("model", [*tune_layers.CASES])
def test_every_way_is_close_to_fp32(model: str, batch: Sequences) -> None:
    with torch.inference_mode():
        case = tune_layers.CASES[model](batch, torch.device("cpu"))
        ways = [case.base] + [
            {"mode": mode, **{place: names[which] for place, names in places.items()}}
            for mode, places in case.modes.items()
            for which in (0, -1)
        ]
        rounding = case.error(case.base)
        assert 0.0 < rounding < 0.06
        for way in ways:
            assert case.error(way) < 1.2 * rounding, way


@pytest.mark.parametrize("model", [*tune_layers.CASES])
def test_every_run_starts_from_the_same_rows(model: str) -> None:
    with torch.inference_mode():
        case = tune_layers.CASES[model](BATCH, torch.device("cpu"))
        rows = case.rows.residual if isinstance(case, DecoderCase) else case.buffers.hidden
        run = case.enqueue(case.base, 2)
        run()
        first = rows.clone()
        run()
        assert torch.equal(rows, first)


class Counted:
    """A case in which a way takes a µs for every choice that is not the last at its place."""

    def __init__(self) -> None:
        self.m, self.num_layers = 512, 1
        self.shapes: Mapping[str, tuple[int, int]] = {"left": (64, 32), "qkv": (96, 32)}
        self.epilogues: Mapping[str, Mapping[str, Epilogue]] = {
            "plain": {"left": "plain"}, "heads": {"left": "plain", "qkv": "unscaled-rope"}
        }  # fmt: skip
        self.base: Way = {"mode": "plain", "left": None, "early": "NO"}
        self.modes: Mapping[str, Places] = {
            "plain": {"left": [None, "a", "b", "wrong"], "early": ["NO", "AT_ONCE"]},
            "heads": {"left": [None, "a", "b"], "early": ["NO", "AT_ONCE"], "qkv": ["c", "d"]},
            "sums": {"left": []},
        }

    def enqueue(self, way: Way, num_layers: int) -> Callable[[], object]:
        names = {"b", "AT_ONCE", "d", "wrong"}
        return lambda: 1.0 + sum(name not in names for place, name in way.items() if place != "mode")

    def error(self, way: Way) -> float:
        return 0.1 if "wrong" in way.values() else 0.01


def test_the_best_of_each_mode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_layers, "graph_us", lambda enqueue, *_: enqueue())
    case: Case = Counted()
    found = tune_layers.search(case, float("inf"))
    best = {"mode": "plain", "left": "b", "early": "AT_ONCE"}
    assert found["best"] == {
        "base": case.base,
        "plain": best,
        "heads": {"mode": "heads", "left": "b", "early": "AT_ONCE", "qkv": "d"},
    }
    measured = found["measured"]
    assert isinstance(measured, list)
    assert measured[0] == {"us": 1.0, "error": 0.01, **best}
    assert [one["left"] for one in measured if one["us"] == float("inf")].count("wrong") > 0


@pytest.mark.parametrize(("rows", "held"), [(2047, []), (2048, [(2500, 2)])])
def test_many_rows_are_timed_while_they_are_held(
    rows: int, held: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def graph_us(enqueue: Callable[[], object], *times: int) -> float:
        asked.append(times)
        return 100.0

    monkeypatch.setattr(tune_layers, "graph_us", graph_us)
    case = Counted()
    case.m = rows
    tune_layers.Search(case, math.inf).measure(case.base)
    assert asked == [(4, 3), *held]


def test_nothing_is_timed_past_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_layers, "graph_us", lambda *_: pytest.fail("timed"))
    assert tune_layers.search(Counted(), 0.0)["measured"] == []


def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    def graph_us(enqueue: Callable[[], object], replays: int, rounds: int) -> float:
        timed.append(enqueue())
        return 3.0

    monkeypatch.setattr(tune_layers, "graph_us", graph_us)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    out, table = tmp_path / "layers.json", tmp_path / "table.json"
    tune_layers.main(
        [
            "--out",
            str(out),
            "--batch",
            str(BATCH),
            "--model",
            "bge-m3",
            "--device",
            "cpu",
            "--table",
            str(table),
        ]
    )
    assert read_table(table) == read_table(TABLE_PATH)  # nothing was faster
    found = json.loads(out.read_text())[f"bge-m3 {BATCH}"]
    assert found["best"]["base"]["attention"] == "fa4"
    assert len(found["measured"]) == len(timed) > 8
    assert {one["early"] for one in found["measured"]} == {early.name for early in Early}


def line(kernel: str | None, m: int, epilogue: str = "plain", n: int = 64) -> dict[str, object]:
    return {"epilogue": epilogue, "n": n, "k": 32, "min_m": m, "kernel": kernel, "us": 1.0, "plain_us": 4.0}


def test_the_best_way_becomes_lines_of_the_table() -> None:
    case: Case = Counted()
    best = {"mode": "plain", "left": "b", "early": "AT_ONCE"}
    slow = {"mode": "heads", "left": "b", "qkv": "d", "early": "AT_ONCE"}
    measured = [{"us": 1.0, "error": 0.0, **best}, {"us": 2.0, "error": 0.0, **slow}]
    base = {"us": 4.0, "error": 0.0, **case.base}
    found = {"best": {"base": case.base, "heads": slow, "plain": best}, "measured": [*measured, base]}
    # What another mode would take is said to be not wanted.
    early = line("b", 512) | {"early": True}
    assert tune_layers.best_lines(case, found, 512) == [early, line(None, 512, "unscaled-rope", 96)]
    close = {**found, "measured": [{**measured[0], "us": 3.99}, base]}
    assert [one["kernel"] for one in tune_layers.best_lines(case, close, 512)] == [None, None]


def test_new_lines_replace_old_ones_up_to_where_those_go_on() -> None:
    old = [line("x", 256), line("y", 512), line("z", 4096), line("other", 512, n=8)]
    new = [line("a", 512), line(None, 1024), line("a", 768), line("q", 512, "unscaled-rope", 96)]
    new += [line("a", 1024, n=16), line("a", 512, n=16) | {"early": True}]
    found = layer_table.merged(old, new, 2048)
    assert [(one["n"], one["min_m"], one["kernel"]) for one in found] == [
        (64, 256, "x"), (64, 512, "a"), (64, 1024, None), (64, 2048, "y"), (64, 4096, "z"),
        (8, 512, "other"), (96, 512, "q"), (96, 2048, None),
        (16, 512, "a"), (16, 1024, "a"), (16, 2048, None),
    ]  # fmt: skip
    assert [one["min_m"] for one in found if one.get("early")] == [512]


def test_without_a_number_of_rows_to_go_on_at_new_lines_hold_for_all_more() -> None:
    old = [line("x", 512), line("z", 4096), line("other", 512, n=8)]
    found = layer_table.merged(old, [line("a", 2048), line("b", 16384)], None)
    assert [(one["n"], one["min_m"], one["kernel"]) for one in found] == [
        (64, 512, "x"), (64, 2048, "a"), (64, 16384, "b"), (8, 512, "other")
    ]  # fmt: skip


def test_each_number_of_rows_holds_up_to_the_next_that_is_measured() -> None:
    old = [line("x", 512), line("y", 1024), line("z", 4096)]
    found = tune_layers.updated(old, [line("a", 2560), line("b", 512)])
    assert [(one["min_m"], one["kernel"]) for one in found] == [
        (512, "b"), (768, "x"), (1024, "y"), (2560, "a"), (2816, "y"), (4096, "z")
    ]  # fmt: skip


def test_a_batch_is_named_by_its_sequences() -> None:
    batch = Sequences.parse("5x512")
    assert (batch, batch.rows, str(batch)) == (Sequences(5, 512), 2560, "5x512")
    for text in ("512", "0x512", "5x", "5xx512", "5x-1"):
        with pytest.raises(ValueError, match=r".+"):
            Sequences.parse(text)


@pytest.mark.parametrize(("batch", "most"), [(BATCH, 128 * 128), (Sequences(128, 16), None)], ids=str)
def test_tiles_of_few_blocks_are_tried_for_many_rows_alone(
    batch: Sequences, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Epilogue, int]] = []
    monkeypatch.setattr(
        decoder_case, "built", lambda epilogue, *most: asked.append((epilogue, *most)) or built(epilogue)
    )
    with torch.inference_mode():
        tune_layers.CASES["pplx-embed"](batch, torch.device("cpu"))
    bounded = {call for call in asked if len(call) == 2}
    assert bounded == ({("residual", most)} if most else set())


def test_products_with_clusters_of_more_rows_are_left_out() -> None:
    names = [None, "fa4", "gemm-plain-64x64-cooperative-1x1", "gemm-plain-64x64-cooperative-2x1"]
    assert tune_layers.fitting(names, 64) == names[:3]
    assert tune_layers.fitting(names, 128) == names
