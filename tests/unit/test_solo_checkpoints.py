"""A run alone that saves, is cut short and goes on: the same bits as one that was never cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flodl.checkpoint.document import CONSENSUS, read_whole
from flodl.checkpoint.files import write_whole
from flodl.checkpoint.folder import find_checkpoints
from flodl.checkpoint.start import Start, prepare
from flodl.errors import CheckpointError
from flodl.plan import build_plan
from flodl.rank.callbacks import BatchInfo
from flodl.rank.parts import Parts
from flodl.rank.solo import run_solo

LENGTH = 50
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class Points:
    """Noise in every item, so that a batch that draws anything else than before shows."""

    def __init__(self, length: int = LENGTH, factor: float = 1.0) -> None:
        self.x = factor * torch.randn(length, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(4), self.x[index].sum()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))


def parts(kind: str = "adam", **changes: Any) -> Parts:
    base: dict[str, Any] = {"model": net, "optimizer": OPTIMIZERS[kind], "loss": loss, "data": Points()}
    return Parts(**(base | {"scheduler": lambda position: 1.0 / (1.0 + position / 100.0)} | changes))


def run(directory: Path, given: Parts, **settings: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"batch_size": 8, "epochs": 3, "mode": "solo", "devices": ["cpu"], "seed": 1}
    plan = build_plan(**(base | settings))
    start = prepare(plan, directory.name, len(given.data))
    directory.mkdir()
    try:
        return run_solo(plan, given, str(directory), start=start)
    finally:
        start.release()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / CONSENSUS)


def same(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_was_cut_short_at_an_epochs_end_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    run(tmp_path / "whole", parts(kind), epochs=4)
    folder = tmp_path / "checkpoints"

    class Cut(Exception):
        pass

    def cut(batch: BatchInfo) -> None:
        if (batch.epoch, batch.index) == (2, 3):
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", parts(kind, callbacks=(cut,)), epochs=4, checkpoint=folder)
    assert [number for number, _ in find_checkpoints(folder)] == [2, 1]
    result = run(tmp_path / "rest", parts(kind), epochs=4, checkpoint=folder, resume="auto")
    assert same(tmp_path / "whole", tmp_path / "rest")
    assert not same(tmp_path / "whole", tmp_path / "cut")
    assert (result["resumed_from"] or {})["round"] == 2
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["epochs"] == whole["epochs"]
    assert result["batches"] == 2 * 7
    assert [number for number, _ in find_checkpoints(folder)] == [4, 3, 2]
    assert same(tmp_path / "rest", find_checkpoints(folder)[0][1])


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    run(tmp_path / "whole", parts("sgd"), epochs=5)
    run(tmp_path / "first", parts("sgd"), epochs=2, checkpoint=tmp_path / "c", checkpoint_every_epochs=9)
    assert [number for number, _ in find_checkpoints(tmp_path / "c")] == [2]
    run(tmp_path / "more", parts("sgd"), epochs=5, checkpoint=tmp_path / "c", resume=True)
    assert same(tmp_path / "whole", tmp_path / "more")


def test_another_optimizer_begins_anew_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "first", parts("sgd"), epochs=1, checkpoint=tmp_path / "c")
    run(tmp_path / "second", parts("adam"), epochs=2, checkpoint=tmp_path / "c", resume=True)
    assert "holds the state of SGD, and the optimizer is Adam now" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": lambda: net(9)}, r"tensor 0\.weight has shape \[9, 4\], not \[8, 4\]"),
        ({"data": Points(factor=2.0)}, "holds other values"),
    ],
)
def test_a_checkpoint_of_another_model_or_of_other_data_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    run(tmp_path / "first", parts(), epochs=1, checkpoint=tmp_path / "c")
    trained: list[BatchInfo] = []
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path / "b", parts(callbacks=(trained.append,), **changes), checkpoint=tmp_path / "c", resume=True)
    assert trained == []


def test_of_many_tensors_twenty_are_named(tmp_path: Path) -> None:
    def deep(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), *(nn.Linear(width, width) for _ in range(14)), nn.Linear(width, 1))

    run(tmp_path / "first", parts(model=lambda: deep(3)), epochs=1, checkpoint=tmp_path / "c")
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path / "b", parts(model=lambda: deep(5)), checkpoint=tmp_path / "c", resume=True)
    assert str(caught.value).count("has shape") == 20
    assert "and 11 more" in str(caught.value)


def test_a_failed_save_warns_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[Path] = []

    def full_at_first(path: Path, pieces: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write_whole(path, pieces)

    monkeypatch.setattr("flodl.checkpoint.files.write_whole", full_at_first)
    result = run(tmp_path / "a", parts(), checkpoint=tmp_path / "c")
    assert result["degraded"] == ["no checkpoint after epoch 0: No space left on device"]
    assert "no checkpoint after epoch 0" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "round-000002", "round-000003"]
    assert read_whole(tmp_path / "c" / "round-000003").round == 3


def test_a_folder_that_is_lost_on_the_way_costs_the_checkpoints_only(tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def lose(batch: BatchInfo) -> None:
        if (batch.epoch, batch.index) == (1, 0):
            shutil.rmtree(folder)
            folder.write_text("in the way")

    run(tmp_path / "whole", parts())
    result = run(tmp_path / "a", parts(callbacks=(lose,)), checkpoint=folder)
    assert [words.partition(":")[0] for words in result["degraded"]] == [
        "no checkpoint after epoch 1",
        "no checkpoint after epoch 2",
    ]
    assert same(tmp_path / "whole", tmp_path / "a")


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_is_saved_at_the_next_batch_and_ends_with_the_same_bits(
    tmp_path: Path, number: signal.Signals, raised: type[BaseException]
) -> None:
    whole = run(tmp_path / "whole", parts(), epochs=3, checkpoint=tmp_path / "a")

    def press(info: BatchInfo) -> None:
        if info.epoch == 1 and info.index == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(raised):
        run(tmp_path / "cut", parts(callbacks=(press,)), epochs=3, checkpoint=tmp_path / "b")
    assert signal.getsignal(number) is before
    _, path = find_checkpoints(tmp_path / "b")[0]
    assert sum(b.count for b in read_whole(path).contributed) == whole["batches"] // 3 + 3
    resumed = run(tmp_path / "resumed", parts(), epochs=3, checkpoint=tmp_path / "b", resume=True)
    assert same(tmp_path / "whole", tmp_path / "resumed")
    assert resumed["epochs"] == whole["epochs"]


def test_a_second_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    def press_twice(info: BatchInfo) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", parts(callbacks=(press_twice,)), epochs=3, checkpoint=tmp_path / "b")
    assert find_checkpoints(tmp_path / "b") == []


def test_without_a_folder_nothing_is_saved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    plan = build_plan(batch_size=8, epochs=1, mode="solo", devices=["cpu"], seed=1)
    result = run_solo(plan, parts(), str(tmp_path / "a"), start=Start())
    assert result["resumed_from"] is None
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [CONSENSUS, "result.json"]
