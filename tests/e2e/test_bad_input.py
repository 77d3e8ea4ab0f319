"""Bad input that takes processes, disks or programs to try: it works, or ends with one clear message; none hangs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from flodl import Trainer
from flodl.checkpoint.document import CONSENSUS, read_whole
from flodl.checkpoint.folder import find_checkpoints
from flodl.errors import PlanError, RunFailed
from flodl.rank.callbacks import BatchInfo
from flodl.records.schedule import read_lines
from tests.e2e import bad_parts
from tests.e2e.bad_parts import BATCH_SIZE, BATCHES, COUNTED, LAST, SAMPLES
from tests.unit.fresh_python import SOURCE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts file systems, looks at processes"),
]
ONCE = {(0, index): 1 for index in range(BATCHES)}


def ranks(case: str, place: Path, **settings: Any) -> Trainer:
    """Two ranks on the parts of bad_parts.<case>, six batches each to an average."""
    base = {"batch_size": BATCH_SIZE, "devices": ["cpu"] * 2, "anchor": 2, "seed": 1, "run_directory": place / "run"}
    return Trainer(entry=f"tests.e2e.bad_parts:{case}", **(base | settings))


def alone(place: Path, **changes: Any) -> Trainer:
    base = {"batch_size": BATCH_SIZE, "devices": "cpu", "seed": 1, "run_directory": place / "run"}
    return Trainer(**(bad_parts.parts() | base | changes))


def contributed(directory: Path) -> Counter[tuple[int, int]]:
    """How often each batch was contributed, by the journal."""
    ranges = [piece for line in read_lines(directory / "journal.jsonl") for piece in line["contributed"]]
    return Counter((epoch, index) for epoch, first, count in ranges for index in range(first, first + count))


def failure(trainer: Trainer) -> tuple[RunFailed, str, str]:
    """The error and its first two lines."""
    with pytest.raises(RunFailed) as caught:
        trainer.run(quiet=True)
    first, second, *_ = str(caught.value).splitlines()
    assert second.startswith(f"The log is {caught.value.log_path}; ")
    assert Path(caught.value.log_path).exists()
    return caught.value, first, second


def is_finite(path: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


# ---- models and losses in several ranks


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
def test_odd_tensors_are_averaged_each_by_its_rule(tmp_path: Path, mode: str) -> None:
    result = ranks("odd", tmp_path, mode=mode).run(quiet=True)
    assert contributed(tmp_path / "run") == ONCE
    assert result.degraded == []
    model = result.model
    assert model.line.weight is model.tied.weight
    assert (model.scale.dtype, model.empty.shape, model.strided.shape) == (torch.float64, (0, 3), (3, 4))
    assert (model.whole.tolist(), model.flags.tolist()) == ([0, 1, 2], [True, False])
    assert (model.limit.tolist(), model.seen.tolist()) == ([-math.inf] * 2, [True] * 2)
    counts = {name: getattr(model, f"{name}_count") for name in COUNTED}
    assert [str(count.dtype) for count in counts.values()] == [f"torch.{name}" for name in COUNTED]
    # Each rank adds one per batch; a round takes the mean of floats and the largest of integers.
    values = {name: count.tolist() for name, count in counts.items()}
    assert values["int8"] == values["int64"]
    assert all(0.0 < a == b <= BATCHES for a, b in values.values())
    assert all(values[name][0] <= values["int64"][0] for name in COUNTED)
    assert values["float64"] == pytest.approx(values["float32"])


def test_a_model_that_is_wrapped_ends_the_run_before_training(tmp_path: Path) -> None:
    error, first, second = failure(ranks("wrapped", tmp_path))
    assert "a rank failed before training began: rank " in first
    assert first.endswith(
        "PlanError: model = 'DistributedDataParallel': the model is wrapped in DistributedDataParallel, and flodl does "
        "the averaging. Allowed: the plain module, unwrapped."
    )
    assert second.endswith("nothing was committed.")
    assert error.log_path.endswith(".log")


def test_a_loss_that_is_nan_on_one_rank_ends_the_run_and_keeps_the_average(tmp_path: Path) -> None:
    _, first, second = failure(ranks("always_nan", tmp_path, epochs=4, mode="cpu-sync"))
    assert "tensor 'line.weight' of rank 1" in first
    assert f"is kept in {tmp_path / 'run' / CONSENSUS}" in second
    assert is_finite(tmp_path / "run" / CONSENSUS)


def test_a_loss_that_is_nan_once_costs_no_batch(tmp_path: Path) -> None:
    result = ranks("once_nan", tmp_path, mode="cpu-sync").run(quiet=True)
    assert contributed(tmp_path / "run") == ONCE
    (said,) = result.degraded
    assert "rank 1 was left out of round " in said
    assert "tensor 'line.weight' of rank 1" in said
    assert is_finite(tmp_path / "run" / CONSENSUS)


# ---- data and loaders


def test_an_item_that_raises_ends_the_run_with_its_name(tmp_path: Path) -> None:
    error, first, second = failure(ranks("torn", tmp_path, loader={"workers": 1}))
    remedy = "Every item from 0 to len(data) - 1 must be readable."
    assert f"RunFailed: data[{LAST}] raised ValueError: torn. {remedy}" in first
    assert f"is kept in {tmp_path / 'run' / CONSENSUS}" in second
    assert "In loader process loader-0:" in error.rank_traceback
    assert is_finite(tmp_path / "run" / CONSENSUS)


def test_a_loader_process_that_is_killed_costs_its_rank_a_restart_and_no_batch(tmp_path: Path) -> None:
    # Under this seed the item is in batch 10 of epoch 0: a failure before the first commit would end the run.
    settings = {"loader": {"workers": 1}, "mode": "cpu-sync", "epochs": 2, "seed": 34}
    result = ranks("fatal", tmp_path, **settings).run(quiet=True)
    assert contributed(tmp_path / "run") == ONCE | {(1, index): 1 for _, index in ONCE}
    assert (tmp_path / "run" / "killed").exists()
    assert result.raw["deaths"] == 1
    assert "ended with signal 9. If it was killed for memory" in " ".join(result.degraded)


# ---- disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "flodl-test", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    """Until not one page is left."""
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


class Filler:
    """A view that fills the disk at the first record of a kind."""

    def __init__(self, disk: Path, kind: str) -> None:
        self._disk = disk
        self._kind = kind

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == self._kind:
            fill(self._disk)

    def close(self) -> None: ...


def whole_rounds(folder: Path) -> list[int]:
    """Rounds of the checkpoints there, all of them whole; and nothing else is there."""
    found = find_checkpoints(folder)
    assert {path.name for path in folder.iterdir()} == {".lock", *(path.name for _, path in found)}
    return [read_whole(path).round for _, path in found]


def test_a_disk_that_fills_up_costs_ranks_the_later_checkpoints_only(tmp_path: Path, disk: Path) -> None:
    trainer = ranks("parts", tmp_path, epochs=3, checkpoint=disk / "c")
    result = trainer.run(view=Filler(disk, "checkpoint"), quiet=True)
    assert contributed(tmp_path / "run") == Counter({(epoch, index): 1 for epoch in range(3) for _, index in ONCE})
    assert len(whole_rounds(disk / "c")) == 1
    assert result.degraded
    assert all("no checkpoint of round" in words and "No space left on device" in words for words in result.degraded)


def test_a_disk_that_fills_up_costs_a_run_alone_the_later_checkpoints_only(tmp_path: Path, disk: Path) -> None:
    def fill_later(batch: BatchInfo) -> None:
        if batch.epoch == 1:
            fill(disk)

    result = alone(tmp_path, epochs=3, checkpoint=disk / "c", callbacks=[fill_later]).run(quiet=True)
    assert [epoch["samples"] for epoch in result.metrics] == [SAMPLES] * 3
    assert whole_rounds(disk / "c") == [1]
    assert [words.partition(":")[0] for words in result.degraded] == [
        "no checkpoint after epoch 1",
        "no checkpoint after epoch 2",
    ]
    assert all("No space left on device" in words for words in result.degraded)


def test_a_result_that_finds_no_room_is_said_and_a_failure_stays_the_one_raised(tmp_path: Path, disk: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        alone(tmp_path, run_directory=disk / "run", callbacks=[lambda batch: fill(disk)]).run(quiet=True)
    first, second = str(caught.value).splitlines()
    assert first.startswith("the run trained to its end, but its result could not be saved: ")
    assert "No space left on device" in first
    assert second.startswith(f"Make room or give write access in {disk / 'run'}")
    assert list((disk / "run").iterdir()) == []
    (disk / "filler").unlink()

    def fail(batch: BatchInfo) -> None:
        fill(disk)
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own") as failed:
        alone(tmp_path, run_directory=disk / "again", callbacks=[fail]).run(quiet=True)
    (note,) = failed.value.__notes__
    assert note.startswith("flodl: the model as it stood is lost: ")
    assert "No space left on device" in note


def test_ranks_whose_result_finds_no_room_have_their_checkpoint(tmp_path: Path, disk: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": tmp_path / "c", "resume": "auto"}
    trainer = ranks("parts", tmp_path, run_directory=disk / "run", **settings)
    with pytest.raises(RunFailed) as caught:
        trainer.run(view=Filler(disk, "commit"), quiet=True)
    first, second = str(caught.value).splitlines()
    assert "trained to its end, but its result could not be saved: " in first
    assert first.endswith("No space left on device")
    assert second.startswith(f"Make room or give write access in {disk / 'run'}")
    result = ranks("parts", tmp_path, **settings).run(quiet=True)
    assert result.reasons[-1].endswith("nothing was trained")
    assert result.metrics[0]["samples"] == SAMPLES
    assert is_finite(tmp_path / "run" / CONSENSUS)


@pytest.mark.parametrize("make", [ranks, alone], ids=["ranks", "alone"])
@pytest.mark.parametrize("harm", [fill, read_only], ids=["full", "read-only"])
@pytest.mark.parametrize("field", ["run_directory", "checkpoint"])
def test_a_disk_that_is_full_or_read_only_is_refused_before_training(
    tmp_path: Path, disk: Path, make: Callable[..., Trainer], harm: Callable[[Path], None], field: str
) -> None:
    (disk / "empty").mkdir()
    harm(disk)
    arguments = ("parts", tmp_path) if make is ranks else (tmp_path,)
    for place in (disk / "empty", disk / "new"):
        with pytest.raises(PlanError) as caught:
            make(*arguments, **{field: place}).run(quiet=True)
        first, second = str(caught.value).splitlines()
        assert first.startswith(f"{field} = '{place}': ")
        assert first.endswith("No space left on device" if harm is fill else "Read-only file system")
        assert second.endswith("that can be made and written to.")


# ---- checkpoints at other world sizes


def test_a_flipped_checkpoint_is_passed_over_and_its_run_goes_on_at_other_world_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    alone(tmp_path, epochs=2, checkpoint=folder, run_directory=tmp_path / "first").run(quiet=True)
    damaged = folder / "round-000002" / CONSENSUS
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    two = ranks("parts", tmp_path, epochs=2, checkpoint=folder, resume=True, run_directory=tmp_path / "two").run(
        quiet=True
    )
    assert (two.resumed_from or {})["path"] == str(folder / "round-000001")
    assert two.degraded[0].startswith(f"a checkpoint is passed over: {damaged} was altered")
    assert contributed(tmp_path / "two") == Counter({(1, index): 1 for _, index in ONCE})
    one = alone(tmp_path, epochs=3, checkpoint=folder, resume="auto", run_directory=tmp_path / "one").run(quiet=True)
    assert one.raw["samples"] == SAMPLES
    assert [epoch["samples"] for epoch in one.metrics] == [SAMPLES] * 3


# ---- programs

IMPORTS = """
import os, sys, time
import torch
import flodl
from tests.e2e.bad_parts import BATCH_SIZE, parts
"""
WITHOUT_GUARD = """
def train(**settings):
    return flodl.Trainer(**parts(**settings), batch_size=BATCH_SIZE, devices=["cpu"] * 2, anchor=2).run(quiet=True)

first = train()
def go_on():
    model = parts()["model"]()
    model.load_state_dict(first.model.state_dict())
    return model
second = train(model=go_on)
print(first.rounds > 0, second.metrics[0]["loss"] < first.metrics[0]["loss"])
"""
SPAWNING = """
flodl.Trainer(
    **parts(), batch_size=BATCH_SIZE, devices="cpu", loader={"workers": 1, "start_method": "spawn"}
).run(quiet=True)
"""
OF_CHANCE = """
from torch.utils.data import Subset
data = Subset(parts()["data"], range(8 + os.getpid() % 32))
if __name__ == "__main__":
    flodl.Trainer(**parts(data=data), batch_size=4, devices=["cpu"] * 2, seed=time.time_ns()).run(quiet=True)
"""
KERNEL = """
CELL = '''
print(flodl.Trainer(**parts(), batch_size=BATCH_SIZE, devices="cpu").run(quiet=True).metrics[0]["samples"])
flodl.Trainer(**parts(), batch_size=BATCH_SIZE, devices=["cpu"] * 2).run(quiet=True)
'''
exec(compile(CELL, "<ipython-input-1>", "exec"), globals())
"""


def program(place: Path, name: str, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the body as a file of this name, as a user's program: pytest's own variables are not passed on."""
    (place / f"{name}.py").write_text(IMPORTS + body)
    root = str(Path(__file__).resolve().parents[2])
    inherited = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    path = os.pathsep.join([SOURCE, root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *(options or (f"{name}.py",))],
        cwd=place,
        env={**inherited, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def last_error(done: subprocess.CompletedProcess[str], kind: str) -> list[str]:
    """The lines of the error that ended the program, from its first on."""
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    return lines[max(at for at, line in enumerate(lines) if line.startswith(f"flodl.errors.{kind}: ")) :]


def test_a_script_without_the_guard_trains_twice_and_its_second_run_sees_the_first(tmp_path: Path) -> None:
    done = program(tmp_path, "train", WITHOUT_GUARD)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True\n"
    first, second = (json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/result.json")))
    assert (first["phase"], second["phase"], first["deaths"], second["deaths"]) == ("done", "done", 0, 0)


def test_a_script_without_the_guard_whose_loader_imports_it_is_told_of_the_guard(tmp_path: Path) -> None:
    first, second = last_error(program(tmp_path, "train", SPAWNING), "RunFailed")[:2]
    assert first.endswith("ended with exit code 1 before it read anything")
    assert 'put the statements that the script runs under `if __name__ == "__main__":`' in second


def test_a_plan_that_depends_on_time_or_chance_is_refused_by_field_before_training(tmp_path: Path) -> None:
    lines = last_error(program(tmp_path, "train", OF_CHANCE), "RunFailed")
    assert "a rank failed before training began" in lines[0]
    assert "the script made another plan in rank " in lines[0]
    assert ": seed is " in lines[0]
    assert "keep time, chance and process ids out of it" in lines[0]
    assert lines[1].endswith("nothing was committed.")


def test_a_notebook_trains_on_one_device_and_is_told_of_entries_for_more(tmp_path: Path) -> None:
    done = program(tmp_path, "ipykernel_launcher", KERNEL, "-m", "ipykernel_launcher")
    assert done.stdout == f"{SAMPLES}\n"
    first, second = last_error(done, "PlanError")
    assert first.endswith("by running this program again: this is a notebook or an IPython session")
    assert 'use Trainer(entry="package.module:build"' in second
