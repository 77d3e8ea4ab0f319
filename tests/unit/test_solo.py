"""A run alone: the same step and feed as a rank's, every batch in order, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from flodl.errors import RunFailed
from flodl.plan import LoaderPlan, Plan, build_plan
from flodl.rank.parts import Parts
from flodl.rank.seeds import derive, plant
from flodl.rank.solo import run_solo

LENGTH = 50


class Points:
    def __init__(self, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(LENGTH, 4, generator=generator)
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad:
            raise ValueError("torn")
        return self.x[index] + 0.1 * torch.randn(4), self.x[index].sum()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


def parts(**changes: Any) -> Parts:
    base: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "loss": loss,
        "data": Points(),
    }
    return Parts(**(base | changes))


def plan(**settings: Any) -> Plan:
    return build_plan(**({"batch_size": 8, "epochs": 3, "mode": "solo", "devices": ["cpu"], "seed": 1} | settings))


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "consensus.safetensors")


def run(directory: Path, settings: Plan, given: Parts) -> dict[str, torch.Tensor]:
    directory.mkdir()
    run_solo(settings, given, str(directory))
    return saved(directory)


def test_the_result_says_what_was_trained_and_the_model_is_saved(tmp_path: Path) -> None:
    def mean_error(model: nn.Module, loader: DataLoader[Any]) -> dict[str, float]:
        return {"error": float(sum(loss(model, batch) for batch in loader))}

    told: list[int] = []
    given = parts(evaluate=mean_error, eval_data=Points(), callbacks=(lambda info: told.append(info.position),))
    result = run_solo(plan(), given, str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (result["samples"], result["batches"], result["rounds"]) == (150, 21, 0)
    assert [epoch["epoch"] for epoch in result["epochs"]] == [0, 1, 2]
    assert result["epochs"][2]["loss"] < result["epochs"][0]["loss"]
    assert result["epochs"][2]["metrics"]["error"] < result["epochs"][0]["metrics"]["error"]
    assert told == [epoch * 50 + index * 8 for epoch in range(3) for index in range(7)]
    assert 0.0 < result["step_ms"] < 1e3 * result["training_s"] < 1e3 * result["wall_s"]
    assert set(saved(tmp_path)) == set(given.model().state_dict())


def test_a_run_is_bit_equal_to_torch_by_hand(tmp_path: Path) -> None:
    found = run(tmp_path / "run", plan(epochs=1, samples=16), parts())
    plant(derive(1, "model"))
    given = parts()
    model = given.model()
    optimizer = given.optimizer(list(model.parameters()))
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(derive(1, "order", 0)))
    for start in (0, 8):
        plant(derive(1, "data", start))
        items = [given.data[int(index)] for index in order[start : start + 8]]
        plant(derive(1, "step", start))
        optimizer.zero_grad()
        loss(model, tuple(torch.stack(column) for column in zip(*items, strict=True))).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_change_no_bit(tmp_path: Path, workers: int) -> None:
    alone = run(tmp_path / "alone", plan(epochs=1), parts())
    together = run(tmp_path / "together", plan(epochs=1, loader=LoaderPlan(workers=workers)), parts())
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_evaluation_changes_no_bit(tmp_path: Path) -> None:
    def noisy(model: nn.Module, loader: Any) -> dict[str, float]:
        model.train()
        return {"draw": float(torch.rand(())) + sum(float(loss(model.eval(), batch)) for batch in loader)}

    with_it = run(tmp_path / "with", plan(epochs=2), parts(evaluate=noisy, eval_data=Points()))
    without = run(tmp_path / "without", plan(epochs=2), parts())
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_the_run_stops_at_the_batch_that_reaches_the_samples_asked_for(tmp_path: Path) -> None:
    result = run_solo(plan(samples=60), parts(), str(tmp_path))
    assert (result["samples"], result["batches"]) == (50 + 16, 9)


def test_a_dropped_last_batch_is_not_trained(tmp_path: Path) -> None:
    result = run_solo(plan(epochs=2, loader=LoaderPlan(drop_last=True)), parts(), str(tmp_path))
    assert (result["samples"], result["batches"]) == (96, 12)


def test_a_failure_saves_the_model_and_passes_through(tmp_path: Path) -> None:
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(derive(1, "order", 0)))
    with pytest.raises(RunFailed, match=rf"data\[{int(order[20])}\] raised ValueError: torn"):
        run_solo(plan(), parts(data=Points(bad=int(order[20]))), str(tmp_path))
    assert saved(tmp_path)
