"""A run with a death in it, played again from its schedule, has the same bits: round by round, and in the reference."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from flodl import DiLoCo, Trainer  # noqa: E402
from flodl.errors import PlanError, RunFailed  # noqa: E402
from flodl.processes.launcher import launch  # noqa: E402
from flodl.processes.recording import read_recording  # noqa: E402
from flodl.records.record import encode_line  # noqa: E402
from flodl.records.schedule import read_lines  # noqa: E402
from tests.e2e import batchnorm  # noqa: E402
from tests.e2e.reference import reference  # noqa: E402
from tests.e2e.small_launcher import SAMPLES, request_of  # noqa: E402

pytestmark = pytest.mark.e2e
EPOCHS = 4
PADS = ("emulated:4ms", "emulated:9ms", "emulated:13ms")
Records = list[dict[str, Any]]


class Killer:
    """A view that kills the mortal rank, once, when it has sealed this round, and then says so to the others."""

    def __init__(self, directory: Path, round_: int) -> None:
        self.directory = directory
        self.round = round_
        self.pids: dict[int, int] = {}
        self.has_killed = False

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "process_started":
            self.pids[record["rank"]] = record["pid"]
        mortal = ("seal", batchnorm.MORTAL, self.round)
        if (record["kind"], record.get("rank"), record.get("round")) == mortal and not self.has_killed:
            self.has_killed = True
            os.kill(self.pids[batchnorm.MORTAL], signal.SIGKILL)
            (self.directory / batchnorm.KILLED).touch()

    def close(self) -> None: ...


def trainer(directory: Path, parts: str, **settings: Any) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(
        entry=f"tests.e2e.batchnorm:{parts}",
        batch_size=batchnorm.BATCH_SIZE,
        run_directory=directory,
        epochs=EPOCHS,
        seed=3,
        anchor=4,
        outer=DiLoCo(lr=0.7, momentum=0.9, min_window=1),
        **settings,
    )


def of_kind(directory: Path, kind: str) -> Records:
    return [line for line in read_lines(directory / "schedule.jsonl") if line["kind"] == kind]


def hashes(directory: Path) -> list[int]:
    return [line["hash"] for line in of_kind(directory, "commit")]


def assert_is_the_reference(directory: Path) -> None:
    records = list(read_lines(directory / "schedule.jsonl"))
    expected = reference(batchnorm.parts(), records[0]["plan"], records)
    found = load_file(directory / "consensus.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# The recorded run evaluates. One replay evaluates as well and the other does not: it makes no difference to the bits.
@pytest.mark.parametrize(("mode", "parts"), [("cpu-cadence", "evaluated_parts"), ("cpu-async", "parts")])
def test_a_run_with_a_death_is_played_again_bit_by_bit(mode: str, parts: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    killer = Killer(first, 4)
    before = trainer(first, "mortal_parts", mode=mode, devices=list(PADS)).run(quiet=True, view=killer)
    lives = {(line["rank"], line["generation"]) for line in of_kind(first, "seal") if line["batches"]}
    assert lives == {(0, 0), (1, 1), (2, 2), (1, 3)}

    after = trainer(second, parts, mode=mode, devices=["cpu"] * 3, replay=first).run(quiet=True)
    assert hashes(second) == hashes(first)
    assert len(set(hashes(first))) == len(hashes(first)) > 8
    assert (second / "consensus.safetensors").read_bytes() == (first / "consensus.safetensors").read_bytes()
    assert (after.raw["deaths"], after.raw["samples"]) == (1, EPOCHS * batchnorm.SAMPLES)
    assert after.rounds == before.rounds
    accuracies = [[epoch.get("accuracy") for epoch in result.metrics] for result in (before, after)]
    assert None not in accuracies[0]
    assert accuracies[1] == (accuracies[0] if parts == "evaluated_parts" else [None] * EPOCHS)
    assert_is_the_reference(first)
    assert_is_the_reference(second)


# ---- what is refused, and what ends a replay: ranks without torch, which start in a moment


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The directory of a finished run of two small ranks."""
    launch(request_of(tmp_path / "first", quiet=True))
    return tmp_path / "first"


def again(first: Path, **settings: Any) -> dict[str, Any]:
    request = request_of(first.with_name("second"), quiet=True, **settings)
    recording = read_recording(str(first), request.plan, SAMPLES)
    return launch(dataclasses.replace(request, recording=recording))


def rewrite(first: Path, change: Callable[[Records], None]) -> None:
    path = first / "schedule.jsonl"
    records = list(read_lines(path))
    change(records)
    path.write_bytes(b"".join(encode_line(record) for record in records))


def test_a_round_that_differs_ends_the_run_and_is_named(first: Path) -> None:
    recorded = hashes(first)[2]

    def change(records: Records) -> None:
        next(r for r in records if r["kind"] == "commit" and r["round"] == 2)["hash"] ^= 1

    rewrite(first, change)
    with pytest.raises(RunFailed) as caught:
        again(first)
    first_line = str(caught.value).splitlines()[0]
    assert "round 2 of the replay differs" in first_line
    assert f"its hash is {recorded:016x}, recorded is {recorded ^ 1:016x}" in first_line


def test_a_torn_schedule_is_used_up_to_its_last_commit(first: Path) -> None:
    path = first / "schedule.jsonl"
    whole = path.read_bytes()
    at = whole.index(b'"kind":"commit","round":3')
    path.write_bytes(whole[: whole.index(b"\n", at) + 400])
    recorded = hashes(first)
    assert len(recorded) == 4
    result = again(first)
    assert (result["phase"], result["rounds"], result["committed_round"]) == ("done", 3, 3)
    assert hashes(first.with_name("second")) == recorded


def test_another_plan_or_data_set_is_refused_by_field(first: Path) -> None:
    with pytest.raises(PlanError) as caught:
        again(first, epochs=3, seed=1, mode="cpu-sync", devices=["cpu"] * 3, gamma=0.5)
    first_line = str(caught.value).splitlines()[0]
    for words in ("data.epochs: 2 != 3", "seed: 0 != 1", "mode: 'cpu-cadence' != 'cpu-sync'", "devices: 2 != 3"):
        assert words in first_line
    assert "averaging.gamma: 1.0 != 0.5" in first_line
    with pytest.raises(PlanError, match="the data set's length: 64 != 63"):
        read_recording(str(first), request_of(first).plan, 63)


def test_what_changes_no_bit_may_differ(first: Path) -> None:
    changes = {"devices": ["emulated:1ms", "cpu"], "loader": {"workers": 1}, "respawn": 0, "anchor": 3, "detect_s": 9.0}
    assert again(first, **changes)["phase"] == "done"
    assert hashes(first.with_name("second")) == hashes(first)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "schedule.jsonl cannot be read: No such file or directory"),
        (b"", "there is no head"),
        (b'{"kind": "something else"}\n', "there is no head"),
        (b"not a record\n{}\n", "line 1 is no record"),
    ],
)
def test_a_directory_without_a_run_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "schedule.jsonl").write_bytes(content)
    with pytest.raises(PlanError, match=words) as caught:
        read_recording(str(tmp_path), request_of(tmp_path).plan, SAMPLES)
    assert caught.value.field == "replay"


def test_a_schedule_of_more_ranks_or_batches_is_refused(first: Path) -> None:
    def change(records: Records) -> None:
        for record in records:
            if record.get("rank") == 1:
                record["rank"] = 5
            for member in record.get("cohort", ()):
                member["rank"] = 5 if member["rank"] == 1 else member["rank"]

    rewrite(first, change)
    with pytest.raises(PlanError, match="rank 5 has batches that this plan has not"):
        again(first)


def test_the_recorded_number_of_threads_is_set_and_other_versions_are_named(first: Path) -> None:
    def change(records: Records) -> None:
        records[0]["threads"]["rank"] = 2
        records[0]["versions"]["torch"] = "0.1"

    rewrite(first, change)
    result = again(first)
    head = of_kind(first.with_name("second"), "head")[0]
    assert (head["threads"]["rank"], head["replayed"]) == (2, "small")
    assert any("recorded with 0.1: bits may differ" in reason for reason in result["reasons"])
    assert not any("threads" in reason for reason in result["reasons"])
