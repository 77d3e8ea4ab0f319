"""What Trainer(replay=...) takes, and what it refuses before anything of a run exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flodl import Trainer
from flodl.errors import PlanError
from flodl.plan import build_plan, plan_to_dict
from flodl.processes.recording import read_recording
from flodl.records.record import encode_line

SETTINGS: dict[str, Any] = {"mode": "cpu-sync", "devices": ["cpu"] * 2, "batch_size": 4, "seed": 5}


def write_schedule(directory: Path, head: dict[str, Any], **settings: Any) -> None:
    """A run of one round."""
    plan = plan_to_dict(build_plan(**{**SETTINGS, **settings}))
    common = {"run": "first", "plan": plan, "dataset_length": 40, "threads": {"rank": 3, "averaging": 1}}
    seed = {"rank": 0, "generation": 0, "round": 0}
    member = {"rank": 0, "generation": 0, "batches": 0, "samples": 0, "weight": 1.0}
    records = [
        {"kind": "head", **common, **head},
        {"kind": "seal", **seed, "step": 0, "batches": 0, "samples": 0},
        {"kind": "attempt", "round": 0, "attempt": 1, "cohort": [member]},
        {"kind": "commit", "round": 0, "hash": 2**64 - 1},
    ]
    (directory / "schedule.jsonl").write_bytes(b"".join(encode_line(record) for record in records))


def test_a_recording_knows_its_threads_rounds_and_other_versions(tmp_path: Path) -> None:
    write_schedule(tmp_path, {"versions": {"torch": "0.4", "flodl": None}})
    recording = read_recording(str(tmp_path), build_plan(**SETTINGS), 40)
    assert recording.threads == 3
    assert [round_.hash for round_ in recording.script.rounds] == [2**64 - 1]
    assert len([note for note in recording.notes if "recorded with 0.4" in note]) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 5}, "data.batch_size: 4 != 5"),
        ({"seed": 6}, "seed: 5 != 6"),
        ({"micro_batch": 2}, "data.micro_batch: None != 2"),
        ({"loader": {"drop_last": True}}, "loader.drop_last: False != True"),
        ({"clip_grad_norm": 1.0}, "training.clip_grad_norm: None != 1.0"),
        ({"blend": "adopt"}, "averaging.blend: 'delta' != 'adopt'"),
        ({"devices": ["cpu"]}, "devices: 2 != 1"),
    ],
    ids=str,
)
def test_every_setting_that_changes_bits_is_compared(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_schedule(tmp_path, {})
    with pytest.raises(PlanError) as caught:
        read_recording(str(tmp_path), build_plan(**{**SETTINGS, **given}), 40)
    assert words in str(caught.value).splitlines()[0]
    assert (caught.value.field, caught.value.value) == ("replay", str(tmp_path))


@pytest.mark.parametrize(
    "given",
    [
        {"data_check": "structure"},
        {"loader": {"workers": 2, "prefetch": 5}},
        {"devices": ["emulated:5ms", "emulated:cpu*2"]},
        {"anchor": 3, "guard": None},
        {"respawn": 0, "max_failures": 1},
    ],
    ids=str,
)
def test_what_changes_no_bit_is_not(given: dict[str, Any], tmp_path: Path) -> None:
    write_schedule(tmp_path, {})
    assert read_recording(str(tmp_path), build_plan(**{**SETTINGS, **given}), 40).script.lives[0]


def test_a_trainer_refuses_before_a_run_directory_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    trainer = Trainer(
        entry="tests.e2e.batchnorm:parts",
        run_directory=tmp_path / "run",
        replay=tmp_path / "empty",
        **SETTINGS,
    )
    with pytest.raises(PlanError, match=r"schedule\.jsonl cannot be read"):
        trainer.run()
    assert not (tmp_path / "run").exists()


def test_a_run_alone_is_no_replay(tmp_path: Path) -> None:
    write_schedule(tmp_path, {"dataset_length": 490}, devices=["cpu"])
    trainer = Trainer(entry="tests.e2e.batchnorm:parts", replay=str(tmp_path), batch_size=4, devices="cpu", seed=5)
    with pytest.raises(PlanError, match="mode: 'cpu-sync' != 'solo'"):
        trainer.run()


def test_a_replay_begins_at_the_beginning(tmp_path: Path) -> None:
    write_schedule(tmp_path, {})
    plan = build_plan(**SETTINGS, checkpoint=str(tmp_path / "checkpoints"), resume="auto")
    with pytest.raises(PlanError, match="resume = 'auto'"):
        read_recording(str(tmp_path), plan, 40)


@pytest.mark.parametrize("replay", [3, "", b"runs"])
def test_a_replay_that_is_no_path_is_refused(replay: Any) -> None:
    with pytest.raises(PlanError, match="replay = "):
        Trainer(entry="tests.e2e.batchnorm:parts", replay=replay, **SETTINGS)
