"""What run() shows: the view that a name leads to, and what a run on one device tells of itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flodl.errors import PlanError
from flodl.trainer import Trainer, _view_of
from tests.unit.screen import Screen


def make_trainer(**changes: Any) -> Trainer:
    return Trainer(
        model=lambda: nn.Linear(2, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda model, batch: model(batch[0]).mean(),
        data=[(torch.ones(2), 1.0)] * 10,
        **{"devices": "cpu", "batch_size": 2, **changes},
    )


@pytest.mark.parametrize(
    ("view", "is_quiet", "is_solo", "name"),
    [
        (None, False, False, "PlainView"),
        (None, True, False, "NoneType"),
        ("live", False, False, "PlainView"),
        ("json", False, False, "JsonView"),
        ("json", False, True, "JsonView"),
        ("plain", True, False, "PlainView"),
    ],
)
def test_which_view_a_name_leads_to_without_a_terminal(view: Any, is_quiet: bool, is_solo: bool, name: str) -> None:
    assert type(_view_of(view, is_quiet, is_solo)).__name__ == name


def test_a_terminal_gets_a_table_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setattr("flodl.plan.sources.started", lambda: type("Started", (), {"environment": {"TERM": "xterm"}}))
    names = [type(_view_of(view, False, is_solo)).__name__ for view in (None, "live") for is_solo in (False, True)]
    assert names == ["LiveView", "PlainView", "LiveView", "PlainView"]


@pytest.mark.parametrize("view", ["table", "", 3, object(), False])
def test_another_view_is_refused_before_anything_starts(view: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^view = .*\nAllowed: None, 'live', 'plain', 'json', or an object"):
        make_trainer(run_directory=tmp_path / "run").run(view=view)
    assert list(tmp_path.iterdir()) == []


def test_one_device_tells_of_its_epochs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_trainer(epochs=2, run_directory=tmp_path / "first").run()
    lines = capsys.readouterr().err.splitlines()
    said = [line.split(" s  ")[1].partition(":")[0] for line in lines]
    assert said == ["training", "epoch 1 of 2 is done", "epoch 2 of 2 is done"]
    make_trainer(run_directory=tmp_path / "second").run(quiet=True)
    assert capsys.readouterr().err == ""


def test_a_view_that_fails_does_not_end_a_run_on_one_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kinds: list[str] = []

    class Failing:
        def record(self, record: dict[str, Any]) -> None:
            kinds.append(record["kind"])
            if record["kind"] == "epoch":
                raise RuntimeError("no colours left")

        def close(self) -> None:
            kinds.append("closed")

    result = make_trainer(epochs=2, run_directory=tmp_path / "run").run(view=Failing())
    assert len(result.metrics) == 2
    assert kinds == ["head", "phase", "epoch", "closed"]
    assert capsys.readouterr().err.count("no colours left") == 1
