"""consensus.safetensors and result.json: whole or not there, and readable by others."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest
import safetensors

from flodl.checkpoint import files
from flodl.checkpoint.files import finite, write_json
from flodl.checkpoint.tensors import DTYPES
from flodl.plan import build_plan
from flodl.processes.consensus import write_consensus
from flodl.processes.result import RunFacts, result_of
from flodl.protocol.effects import Committed
from flodl.protocol.messages import LayoutSpec, SectionSpec, TensorSpec

SHAPES = [("f32", (3, 5)), ("boolean", (7,)), ("bf16", ()), ("i64", (0, 4)), ("f64", (2,)), ("u8", (1, 1, 1))]
SHAPES += [("f16", (3,)), ("i32", (2, 2)), ("i16", (5,)), ("i8", (9,))]
COMMITTED = Committed(12, 1, 0xAB, 0.5)


def layout_of(shapes: list[tuple[str, tuple[int, ...]]]) -> LayoutSpec:
    tensors, sections = [], []
    for number, (dtype, shape) in enumerate(shapes):
        offset = 128 * number
        tensors.append(TensorSpec(f"part.{number}.ü", shape, dtype, "buffer", offset))
        sections.append(SectionSpec("buffer", dtype, offset, math.prod(shape)))
    return LayoutSpec(128 * len(shapes), tuple(sections), tuple(tensors))


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_every_dtype_and_shape_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", piece)
    layout = layout_of(SHAPES)
    theta = bytes(number * 37 % 251 for number in range(layout.bytes))
    asked: list[int] = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return theta[offset : offset + size]

    path = tmp_path / "consensus.safetensors"
    write_consensus(path, layout, COMMITTED, read)
    assert max(asked) <= piece
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == {tensor.name for tensor in layout.tensors}
    for tensor in layout.tensors:
        name, width = DTYPES[tensor.dtype]
        size = math.prod(tensor.shape) * width
        assert found[tensor.name]["dtype"] == name
        assert tuple(found[tensor.name]["shape"]) == tensor.shape
        assert bytes(found[tensor.name]["data"]) == theta[tensor.offset : tensor.offset + size]
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "round": "12", "hash": "00000000000000ab"}


def test_a_disk_that_fills_up_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "consensus.safetensors"
    layout = layout_of(SHAPES)
    write_consensus(path, layout, COMMITTED, lambda _, size: bytes(size))
    former = path.read_bytes()
    calls: list[int] = []

    def fail_late(offset: int, size: int) -> bytes:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return bytes([1]) * size

    with pytest.raises(OSError, match="No space left"):
        write_consensus(path, layout, COMMITTED, fail_late)
    assert path.read_bytes() == former
    assert [entry.name for entry in tmp_path.iterdir()] == ["consensus.safetensors"]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": math.nan})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def summary_of(
    ms: list[float | None], pauses: list[dict[str, float]], training_s: float, samples: int
) -> dict[str, object]:
    ranks = [
        {"rank": rank, "ms_per_batch": m, "pauses_s": p, "batches": 200, "raw_over_pad": 2}
        for rank, (m, p) in enumerate(zip(ms, pauses, strict=True))
    ]
    return {"ranks": ranks, "training_s": training_s, "samples": samples, "degraded": ["a note"]}


def test_efficiency_counts_each_rank_at_its_own_rate_less_its_pauses() -> None:
    plan = build_plan(mode="cpu-sync", devices=["cpu"] * 2, batch_size=50, epochs=1, seed=0)
    facts = RunFacts(plan, "r", 20.0, COMMITTED)
    # 5000 and 1000 samples per second, for 10 − 2 and 10 − 0 seconds.
    summary = summary_of([10.0, 50.0], [{"evaluate": 1.5, "save": 0.5}, {}], 10.0, 45_000)
    result = result_of(summary, facts)
    assert result["E"] == pytest.approx(45_000 / (5000 * 8 + 1000 * 10))
    assert result["E_wall"] == pytest.approx(45_000 / (6000 * 20))
    assert (result["consensus_hash"], result["committed_round"]) == ("00000000000000ab", 12)
    assert "not a solo measurement" in result["E_basis"]


@pytest.mark.parametrize("ms", [[10.0, None], [None, None]])
def test_efficiency_is_unknown_where_a_rate_is(ms: list[float | None]) -> None:
    plan = build_plan(mode="cpu-sync", devices=["cpu"] * 2, batch_size=50, epochs=1, seed=0)
    result = result_of(summary_of(ms, [{}, {}], 10.0, 0), RunFacts(plan, "r", 1.0, None))
    assert [result[name] for name in ("E", "E_wall", "E_basis", "consensus_hash")] == [None] * 4


def test_an_emulated_device_that_is_too_slow_for_its_word_is_told() -> None:
    plan = build_plan(mode="cpu-sync", devices=["emulated:9ms", "cpu"], batch_size=50, epochs=1, seed=0)
    summary = summary_of([10.0, 50.0], [{}, {}], 10.0, 0)
    facts = RunFacts(plan, "r", 1.0, None)
    assert result_of(summary, facts)["degraded"] == ["a note"]
    summary["ranks"][0]["raw_over_pad"] = 3
    words = "3 of 200 steps on emulated:9ms took longer than that: its speed was not emulated"
    assert result_of(summary, facts)["degraded"] == ["a note", words]


def test_what_json_cannot_say_is_none() -> None:
    assert finite({"a": [1.5, math.nan, (math.inf, "x")], "b": {"c": -math.inf, "d": 0}}) == {
        "a": [1.5, None, [None, "x"]],
        "b": {"c": None, "d": 0},
    }
