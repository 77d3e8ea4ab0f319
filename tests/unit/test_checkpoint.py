"""Checkpoints on disk: whole or not there, known again by their digests, and the right one found to go on from."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from flodl.checkpoint.document import (
    CONSENSUS,
    DOCUMENT,
    FORMAT,
    Document,
    EpochRecord,
    RankRecord,
    optimizer_file,
    read_document,
    read_whole,
)
from flodl.checkpoint.files import write_whole
from flodl.checkpoint.folder import CheckpointFolder, FolderLock, find_checkpoints, whole_name
from flodl.checkpoint.resume import resolve
from flodl.checkpoint.start import give_finished, is_finished, prepare
from flodl.checkpoint.tensors import read_tensors, write_image
from flodl.checkpoint.velocity import VELOCITY, read_velocity, write_velocity
from flodl.errors import CheckpointError, PlanError
from flodl.plan import Plan, build_plan, plan_to_dict
from flodl.protocol.messages import BatchRange, DataSpec, LayoutSpec, SectionSpec, TensorSpec

# Two sections of parameters with a gap in the first, and a buffer between them.
LAYOUT = LayoutSpec(
    256,
    (
        SectionSpec("parameter", "f32", 0, 19),
        SectionSpec("buffer", "f32", 128, 2),
        SectionSpec("parameter", "bf16", 192, 4),
    ),
    (
        TensorSpec("first", (3,), "f32", "parameter", 0),
        TensorSpec("second", (3,), "f32", "parameter", 64),
        TensorSpec("nothing", (0, 4), "f32", "parameter", 76),
        TensorSpec("mean", (2,), "f32", "buffer", 128),
        TensorSpec("third", (2, 2), "bf16", "parameter", 192),
    ),
)
LENGTH = 32


def plan_of(**settings: Any) -> Plan:
    base: dict[str, Any] = {"batch_size": 8, "epochs": 3, "seed": 5, "mode": "cpu-cadence", "devices": ["cpu"] * 2}
    return build_plan(**(base | settings))


def save(folder: CheckpointFolder, number: int, **changes: Any) -> Path:
    """A small whole checkpoint: one epoch of four batches, and two batches of the next."""
    partial = folder.partial(number)
    partial.mkdir(parents=True)
    image = bytes((number + place) % 251 for place in range(LAYOUT.bytes))
    files = (
        write_image(partial / CONSENSUS, LAYOUT, {"round": str(number)}, lambda at, size: image[at : at + size]),
        write_whole(partial / optimizer_file(0), [b"part of rank 0"]),
    )
    values: dict[str, Any] = {
        "format": FORMAT,
        "run": folder.run,
        "round": number,
        "plan": plan_to_dict(plan_of()),
        "layout": LAYOUT,
        "data": DataSpec(LENGTH, "(f32[3], i64)", "17[0]: abc"),
        "world_size": 2,
        "contributed": (BatchRange(0, 0, 4), BatchRange(1, 0, 1), BatchRange(1, 2, 1)),
        "quarantined": (),
        "epochs": (EpochRecord(0, 12.5, 32, 7, {"accuracy": 0.5, "odd": float("nan")}), EpochRecord(1, 3.0, 16)),
        "anchor": 12,
        "ranks": (RankRecord(0, "cpu", 4, 10.5), RankRecord(1, "cpu", 2)),
        "files": files,
    }
    return folder.finish(number, Document(**(values | changes)))


def folder_at(directory: Path, keep: int = 3, base: int = -1, run: str = "a") -> CheckpointFolder:
    return CheckpointFolder(directory, run, keep, base)


def numbers(directory: Path) -> list[int]:
    return [number for number, _ in find_checkpoints(directory)]


# ---- one checkpoint


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = save(folder_at(tmp_path), 123)
    assert path == tmp_path / "round-000123"
    document = read_whole(path)
    assert (document.round, document.anchor, document.layout) == (123, 12, LAYOUT)
    assert document.contributed == (BatchRange(0, 0, 4), BatchRange(1, 0, 1), BatchRange(1, 2, 1))
    assert document.epochs[0].metrics == {"accuracy": 0.5, "odd": None}
    assert document.ranks[1] == RankRecord(1, "cpu", 2, None)
    assert sorted(os.listdir(path)) == sorted([CONSENSUS, DOCUMENT, optimizer_file(0)])
    image = bytes((123 + place) % 251 for place in range(LAYOUT.bytes))
    assert read_tensors(path / CONSENSUS)["mean"] == ("F32", (2,), image[128:136])


def test_any_flipped_or_missing_byte_is_found_and_the_file_named(tmp_path: Path) -> None:
    path = save(folder_at(tmp_path), 1)
    draw = random.Random(11)
    for name in (CONSENSUS, optimizer_file(0), DOCUMENT):
        whole = (path / name).read_bytes()
        for place in {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(60))}:
            altered = bytearray(whole)
            altered[place] ^= 1 << draw.randrange(8)
            (path / name).write_bytes(altered)
            with pytest.raises(CheckpointError, match=name):
                read_whole(path)
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            (path / name).write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=name):
                read_whole(path)
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            read_whole(path)
        (path / name).write_bytes(whole)
    assert read_whole(path).round == 1


def test_a_document_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    path = save(folder_at(tmp_path), 1)
    document = read_document(path)
    stray = msgspec.structs.replace(document.files[0], name="../round-000001/consensus.safetensors")
    (path / DOCUMENT).unlink()
    (path).rename(tmp_path / ".partial-a-round-000002")
    with pytest.raises(CheckpointError, match="elsewhere"):
        read_whole(folder_at(tmp_path).finish(2, msgspec.structs.replace(document, files=(stray,), digest="")))


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = save(folder_at(tmp_path), 1, format=FORMAT + 1)
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}"):
        read_whole(path)


def test_a_velocity_is_one_tensor_per_parameter_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    velocity = np.zeros(19 + 4, dtype=np.float32)
    velocity[[0, 1, 2, 16, 17, 18, 19, 20, 21, 22]] = np.arange(1, 11)
    write_velocity(tmp_path / VELOCITY, LAYOUT, velocity.tobytes())
    found = load_file(tmp_path / VELOCITY)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
        ("first", "second", "third"), np.float32
    )
    assert found["second"].tolist() == [4, 5, 6]
    assert found["third"].tolist() == [[7, 8], [9, 10]]
    assert read_velocity(tmp_path / VELOCITY, LAYOUT) == velocity.tobytes()
    other = msgspec.structs.replace(
        LAYOUT, tensors=(TensorSpec("first", (4,), "f32", "parameter", 0), *LAYOUT.tensors[1:])
    )
    with pytest.raises(CheckpointError, match="no velocity of parameter first"):
        read_velocity(tmp_path / VELOCITY, other)


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}", b"\x08\0\0\0\0\0\0\0" + b"[" * 8])
def test_what_is_no_tensor_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    if content.endswith(b"{}"):
        assert read_tensors(path) == {}
        return
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_tensors(path)


# ---- the folder


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = folder_at(tmp_path, keep=2)
    for number in (3, 9, 10, 200):
        save(folder, number)
    assert numbers(tmp_path) == [200, 10]


def test_a_line_that_was_given_up_is_replaced_by_the_first_checkpoint_of_the_new_one(tmp_path: Path) -> None:
    for number in (10, 20, 30, 40):
        save(folder_at(tmp_path, keep=9, base=number), number)
    assert numbers(tmp_path) == [40, 30, 20, 10]
    resumed = folder_at(tmp_path, keep=3, base=20, run="new")
    assert numbers(tmp_path) == [40, 30, 20, 10]
    save(resumed, 30, anchor=99)
    assert numbers(tmp_path) == [30, 20, 10]
    assert read_whole(tmp_path / whole_name(30)).anchor == 99
    save(folder_at(tmp_path, run="anew"), 5)
    assert numbers(tmp_path) == [5]


def test_half_written_ones_are_no_checkpoints_and_only_they_are_removed(tmp_path: Path) -> None:
    save(folder_at(tmp_path), 7)
    folder_at(tmp_path, run="dead").partial(8).mkdir()
    mine = folder_at(tmp_path, run="mine")
    mine.partial(9).mkdir()
    for name in ("notes", ".partial-things", "round-x"):
        (tmp_path / name).mkdir()
    assert numbers(tmp_path) == [7]
    mine.remove_own()
    assert not mine.partial(9).exists()
    mine.remove_remains()
    assert sorted(os.listdir(tmp_path)) == [".partial-things", "notes", "round-000007", "round-x"]


@pytest.mark.skipif(os.name != "posix", reason="the folder is locked by flock")
def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    script = (
        "import sys; from pathlib import Path; from flodl.checkpoint.folder import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PlanError, match="another run saves to it now"):
            prepare(plan_of(checkpoint=folder), "b", LENGTH)
    finally:
        other.kill()
        other.communicate()
    start = prepare(plan_of(checkpoint=folder), "b", LENGTH)
    assert start.lock is not None
    assert start.lock.is_held
    start.release()
    FolderLock(folder).release()


@pytest.mark.skipif(os.name != "posix", reason="the folder is locked by flock")
def test_a_folder_is_taken_before_anything_is_looked_for_in_it(tmp_path: Path) -> None:
    save(folder_at(tmp_path), 1)
    held = FolderLock(tmp_path)
    for settings in ({}, {"resume": True}):
        with pytest.raises(PlanError, match="another run saves to it now"):
            prepare(plan_of(checkpoint=tmp_path, **settings), "b", LENGTH)
    held.release()
    with pytest.raises(PlanError, match="the folder is not empty"):
        prepare(plan_of(checkpoint=tmp_path), "b", LENGTH)
    FolderLock(tmp_path).release()  # what was refused holds nothing
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        prepare(plan_of(checkpoint=tmp_path / "mistyped", resume=True), "b", LENGTH)
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.skipif(os.name != "posix", reason="the folder is locked by flock")
def test_a_lock_is_released_though_a_forked_child_has_its_descriptor(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock._descriptor is not None
    childs = os.dup(lock._descriptor)  # the same open file, as after a fork
    lock.release()
    FolderLock(tmp_path).release()
    os.close(childs)


# ---- what a run goes on from


def start_of(**settings: Any) -> Any:
    said: list[str] = []
    start = prepare(plan_of(**settings), "b", settings.get("length", LENGTH), said.append)
    start.release()
    assert said == start.warnings
    return start


def test_a_folder_with_something_in_it_needs_a_word(tmp_path: Path) -> None:
    assert start_of(checkpoint=tmp_path / "new").checkpoint is None
    assert start_of(checkpoint=tmp_path / "new").checkpoint is None
    save(folder_at(tmp_path), 1)
    with pytest.raises(PlanError, match="the folder is not empty"):
        start_of(checkpoint=tmp_path)
    assert start_of(checkpoint=tmp_path, overwrite=True).checkpoint is None
    assert numbers(tmp_path) == [1]
    assert start_of(checkpoint=tmp_path, resume="auto").checkpoint.document.round == 1
    assert start_of(checkpoint=tmp_path, resume=True).checkpoint.path == tmp_path / "round-000001"


def test_there_must_be_one_where_it_is_asked_for(tmp_path: Path) -> None:
    assert start_of(checkpoint=tmp_path / "none", resume="auto").checkpoint is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        start_of(checkpoint=tmp_path / "none", resume=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        start_of(resume=tmp_path / "none")


def test_a_bad_one_is_passed_over_for_an_older_whole_one_with_a_warning(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    for number in (1, 2, 3):
        save(folder, number)
    (tmp_path / whole_name(3) / CONSENSUS).write_bytes(b"torn")
    start = start_of(checkpoint=tmp_path, resume="auto")
    assert start.checkpoint.document.round == 2
    (words,) = start.warnings
    assert "passed over" in words
    assert str(tmp_path / whole_name(3) / CONSENSUS) in words
    with pytest.raises(CheckpointError, match=CONSENSUS):
        start_of(resume=tmp_path / whole_name(3))
    for number in (1, 2):
        (tmp_path / whole_name(number) / DOCUMENT).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="is whole"):
        start_of(checkpoint=tmp_path, resume="auto")


def test_a_checkpoint_or_a_folder_of_them_can_be_named(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "old")
    for number in (1, 2):
        save(folder, number)
    assert start_of(resume=tmp_path / "old").checkpoint.document.round == 2
    start = start_of(resume=tmp_path / "old" / whole_name(1), checkpoint=tmp_path / "new")
    assert start.checkpoint.document.round == 1
    assert start_of(resume=tmp_path / "old" / whole_name(1), checkpoint=tmp_path / "old").folder is not None
    save(folder_at(tmp_path / "other"), 5)
    with pytest.raises(PlanError, match="holds other checkpoints"):
        start_of(resume=tmp_path / "old" / whole_name(1), checkpoint=tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_size": 4}, "batch_size"),
        ({"seed": 6}, "seed"),
        ({"loader": {"drop_last": True}}, "loader.drop_last"),
        ({"epochs": 1}, "epochs"),
        ({"samples": 40}, "samples"),
        ({"length": 31}, "data"),
    ],
)
def test_another_training_is_refused_by_the_field(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    save(folder_at(tmp_path), 1)
    length = settings.pop("length", LENGTH)
    with pytest.raises(PlanError) as caught:
        prepare(plan_of(checkpoint=tmp_path, resume=True, **settings), "b", length)
    assert caught.value.field == field


def test_what_does_not_define_the_batches_may_change(tmp_path: Path) -> None:
    save(folder_at(tmp_path), 1)
    settings: list[dict[str, Any]] = [
        {"devices": ["cpu"] * 5},
        {"mode": "cpu-async"},
        {"mode": "solo", "devices": ["cpu"]},
        {"epochs": 9},
        {"samples": 64},
        {"anchor": 3, "micro_batch": 2},
    ]
    for change in settings:
        assert start_of(checkpoint=tmp_path, resume=True, **change).checkpoint.document.round == 1


def test_a_velocity_that_nobody_wants_is_dropped_with_a_warning(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    partial = folder.partial(1)
    partial.mkdir()
    kept = write_velocity(partial / VELOCITY, LAYOUT, bytes(4 * 23))
    (partial / VELOCITY).rename(tmp_path / "aside")
    partial.rmdir()
    path = save(folder, 1)
    document = read_document(path)
    (tmp_path / "aside").rename(path / VELOCITY)
    path.rename(folder.partial(2))
    folder.finish(2, msgspec.structs.replace(document, files=(*document.files, kept), digest=""))
    (words,) = start_of(checkpoint=tmp_path, resume=True).warnings
    assert "velocity" in words
    assert "dropped" in words


def test_a_finished_run_gives_its_result_again(tmp_path: Path) -> None:
    contributed = tuple(BatchRange(epoch, 0, 4) for epoch in range(3))
    path = save(folder_at(tmp_path / "checkpoints"), 8, contributed=contributed)
    plan = plan_of(checkpoint=tmp_path / "checkpoints", resume="auto")
    start = prepare(plan, "b", LENGTH)
    start.release()
    assert is_finished(start, plan, LENGTH)
    assert not is_finished(start, plan_of(epochs=4), LENGTH)
    (tmp_path / "run").mkdir()
    result = give_finished(start, plan, "b", str(tmp_path / "run"))
    assert result["resumed_from"] == {"path": str(path), "round": 8}
    assert result["epochs"][0] == {
        "epoch": 0,
        "loss": 12.5 / 32,
        "samples": 32,
        "round": 7,
        "metrics": {"accuracy": 0.5, "odd": None},
    }
    assert (tmp_path / "run" / CONSENSUS).read_bytes() == (path / CONSENSUS).read_bytes()
    assert resolve(plan.checkpoint, lambda words: None) is not None
