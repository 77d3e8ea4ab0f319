"""What a run gives back: the summary in the user's words, the stored result, the model built at first use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flodl.errors import CheckpointError, PlanError, RunFailed
from flodl.plan.sources import EarlierCall
from flodl.rank.parts import build_parts
from flodl.result import RunResult, error_of, failed_call, make_result, stored_result


class Net(nn.Module):
    """Frozen noise shows whether the seed was planted; a buffer and a tie travel by name."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.tied = self.line
        self.noise = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


PARTS = build_parts(
    {"model": Net, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "loss": lambda m, b: m(b).mean(), "data": [0]}
)


def test_the_controllers_summary_becomes_a_result() -> None:
    raw = {
        "rounds": 12,
        "recomputed": 2,
        "degraded": ["rank 1 died"],
        "reasons": ["anchor 10"],
        "epochs": [{"epoch": 0, "loss": 0.5, "samples": 10, "round": 12, "metrics": {"accuracy": 0.9}}],
        "ranks": [{"rank": 0, "share": 0.75}, {"rank": 1, "share": 0.25}],
        "E": 0.98,
        "wall_s": 3.0,
    }
    result = make_result(raw, "/runs/a")
    assert "loss 0.5, accuracy 0.9" in result.summary()
    assert "train_loss" not in result.summary()
    assert result.metrics == [{"epoch": 0, "loss": 0.5, "samples": 10, "round": 12, "train_loss": 0.5, "accuracy": 0.9}]
    assert (result.shares, result.E, result.E_wall) == ([0.75, 0.25], 0.98, None)
    assert (result.degraded, result.reasons, result.recomputed) == (["rank 1 died"], ["anchor 10"], 2)
    assert result.raw == raw
    assert repr(result) == (
        "<RunResult epoch 1, loss 0.5, accuracy 0.9; 12 rounds, 3.0 s, degraded by 1 events; /runs/a>"
    )
    assert result.summary().splitlines() == [
        "12 rounds in 3.0 s",
        "epoch 1, loss 0.5, accuracy 0.9",
        "shares 75.0 % / 25.0 %",
        "E 0.980 of what these devices do alone, while they train",
        "2 batches trained again",
        "degraded: rank 1 died",
        "all of it in /runs/a",
    ]


@pytest.mark.parametrize(
    ("raw", "raised"),
    [
        ({"phase": "failed", "reason": "rank 1 fell"}, RunFailed),
        ({"phase": "done", "save_error": "consensus.safetensors: No space left on device"}, RunFailed),
        ({"phase": "training", "interrupted": "Ctrl-C"}, KeyboardInterrupt),
    ],
    ids=["failed", "not saved", "interrupted"],
)
def test_a_stored_result_that_is_none_raises_what_the_launcher_did(
    tmp_path: Path, raw: dict[str, Any], raised: type[BaseException]
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(raised, match=r"rank 1 fell|No space left|interrupted"):
        stored_result(str(tmp_path))


def test_a_result_with_nothing_in_it() -> None:
    result = make_result({}, "/runs/a")
    assert (result.metrics, result.shares, result.E, result.rounds) == ([], [], None, 0)
    assert "no epoch" in repr(result)
    assert result.summary()
    with pytest.raises(CheckpointError, match="without the parts"):
        _ = result.model


class _Own(ValueError):
    """Of the user's program."""


@pytest.mark.parametrize(
    ("raised", "again"),
    [
        (CheckpointError("no checkpoint\nmake one"), CheckpointError),
        (PlanError("devices = 0"), PlanError),
        (ValueError("bad"), ValueError),
        (_Own("bad"), ValueError),
        (json.JSONDecodeError("bad", "{", 0), ValueError),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RunFailed),
        (pytest.fail.Exception("bad"), RunFailed),
        (RuntimeError("long" * 10_000), RuntimeError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_raised_again_by_its_class_and_words(raised: BaseException, again: type[BaseException]) -> None:
    call = failed_call("/runs/x", raised)
    assert (call.directory, len(call.message) <= 500) == ("/runs/x", True)
    error = error_of(EarlierCall(*json.loads(json.dumps(call))))
    assert type(error) is again
    assert str(error).startswith(str(raised)[:500])


def result_of(directory: Path, seed: int = 0) -> RunResult:
    (directory / "result.json").write_text("{}")
    return stored_result(str(directory), PARTS, seed)


def test_the_model_is_built_under_the_seed_and_filled(tmp_path: Path) -> None:
    wanted = {"line.weight": torch.full((2, 2), 3.0), "line.bias": torch.ones(2), "count": torch.tensor(4)}
    save_file(wanted, tmp_path / "consensus.safetensors")
    torch.manual_seed(1)
    undisturbed = torch.rand(1)
    torch.manual_seed(1)
    result = result_of(tmp_path, seed=5)
    model = result.model
    assert torch.equal(torch.rand(1), undisturbed), "building the model leaves the caller's generators alone"
    assert isinstance(model, Net)
    assert model is result.model
    assert torch.equal(model.line.weight, wanted["line.weight"])
    assert model.tied is model.line
    assert int(model.count) == 4
    again, other = result_of(tmp_path, seed=5).model, result_of(tmp_path, seed=6).model
    assert torch.equal(dict(again.named_parameters())["noise"], model.noise), "what is frozen comes from the seed"
    assert not torch.equal(dict(other.named_parameters())["noise"], model.noise)


def test_a_model_that_is_not_the_runs(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    path = tmp_path / "consensus.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read"):
        _ = result.model
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        _ = result.model
    save_file({"line.weight": torch.ones(3, 2), "gone": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="holds another model") as caught:
        _ = result.model
    assert "line.weight (3, 2) ((2, 2))" in str(caught.value)
    assert "gone (1,) (no such tensor)" in str(caught.value)


def test_a_loss_of_the_users_own_takes_no_place_from_the_runs() -> None:
    raw = {"epochs": [{"epoch": 0, "loss": 0.5, "samples": 10, "round": 12, "metrics": {"loss": 0.7}}]}
    result = make_result(raw, "/runs/a")
    assert (result.metrics[0]["loss"], result.metrics[0]["train_loss"]) == (0.7, 0.5)
    assert "loss 0.7, train_loss 0.5" in result.summary()
