"""What an optimizer remembers: taken, written, read, averaged and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flodl.errors import CheckpointError, PlanError
from flodl.rank.inner_optimizer import InnerOptimizer
from flodl.rank.optimizer_state import OptimizerState, mean_state, read_state, write_state
from flodl.rank.parts import Parts

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).to(memory_format=torch.channels_last)
    made.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    return made


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        scale: Any = network.scale
        (network(torch.randn(4, 1, 4, 4, generator=draw)).square().mean() * scale).backward()
        optimizer.step()


class Counting(torch.optim.Optimizer):
    """Plain descent that remembers as the schedule-free and parameter-free kinds do: a counter and an estimate in its
    groups, a sum of its own under a name, and all of them change its steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "d": 1.0, "betas": (0.9, 0.999), "hook": object()})
        self.state["history"] = {"sum": torch.zeros(2), "steps": 0}
        self.state["bias"] = torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        history = self.state["history"]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            group["betas"] = (group["betas"][0] ** 2, 0.5)
            for parameter in group["params"]:
                pull = history["sum"].sum() + self.state["bias"].sum()
                parameter.sub_(group["lr"] / group["k"] * group["d"] * group["betas"][0] * (parameter.grad + pull))
        history["sum"] += 0.01
        history["steps"] += 1
        self.state["bias"] += 0.001 * history["steps"]


OPTIMIZERS["counting"] = Counting


def inner(network: nn.Module, make: Any) -> InnerOptimizer:
    return InnerOptimizer(Parts(model=nn.Module, optimizer=make, loss=nn.Module, data=[0]), network)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole, first = model(), model()
    optimizers = [inner(network, OPTIMIZERS[kind]) for network in (whole, first)]
    train(whole, optimizers[0].torch, 5)
    train(first, optimizers[1].torch, 5)
    write_state(tmp_path / "state", optimizers[1].take(is_copy=False))
    second = model()
    second.load_state_dict(first.state_dict())
    resumed = inner(second, OPTIMIZERS[kind])
    resumed.put(read_state(tmp_path / "state"))
    train(whole, optimizers[0].torch, 3, seed=2)
    train(second, resumed.torch, 3, seed=2)
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_forgot_steps_as_a_new_one(kind: str) -> None:
    network, other = model(), model()
    optimizer, fresh = inner(network, OPTIMIZERS[kind]), inner(other, OPTIMIZERS[kind])
    train(network, optimizer.torch, 3)
    optimizer.torch.param_groups[0]["lr"] = 0.025
    optimizer.forget()
    assert all(p.grad is None for p in network.parameters())
    assert optimizer.torch.param_groups[0]["lr"] == 0.025
    network.load_state_dict(other.state_dict())
    fresh.torch.param_groups[0]["lr"] = 0.025
    train(network, optimizer.torch, 3, seed=2)
    train(other, fresh.torch, 3, seed=2)
    for (name, a), b in zip(network.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_copy_stands_and_what_is_no_copy_does_not() -> None:
    network = model()
    optimizer = inner(network, OPTIMIZERS["sgd"])
    train(network, optimizer.torch, 1)
    copy, view = (optimizer.take(is_copy=is_copy) for is_copy in (True, False))
    before = copy.tensors["2.weight/momentum_buffer"].clone()
    train(network, optimizer.torch, 1)
    assert torch.equal(copy.tensors["2.weight/momentum_buffer"], before)
    assert not torch.equal(view.tensors["2.weight/momentum_buffer"], before)


def test_groups_keep_what_they_were_made_with_and_take_what_steps_changed(tmp_path: Path) -> None:
    network = model()
    optimizer = inner(network, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    train(network, optimizer.torch, 1)
    optimizer.torch.param_groups[0]["lr"] = 0.07
    optimizer.torch.param_groups[0]["dampening"] = 0.25
    write_state(tmp_path / "state", optimizer.take(is_copy=False))
    state = read_state(tmp_path / "state")
    assert state.kind == "SGD"
    assert (state.groups[0]["lr"], state.made[0]["lr"]) == (0.07, 0.1)
    assert state.groups[0]["params"] == [name for name, _ in network.named_parameters()]
    other = inner(network, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5))
    other.put(state)
    group = other.torch.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.3, 0.5, 0.25)


def test_a_value_in_a_group_keeps_its_kind(tmp_path: Path) -> None:
    network = model()
    optimizer = inner(network, Counting)
    train(network, optimizer.torch, 2)
    write_state(tmp_path / "state", optimizer.take(is_copy=True))
    other = inner(network, Counting)
    hook = other.torch.param_groups[0]["hook"]
    other.put(read_state(tmp_path / "state"))
    group = other.torch.param_groups[0]
    assert (group["k"], group["d"], group["betas"]) == (2, 2.25, ((0.9**2) ** 2, 0.5))
    assert group["hook"] is hook
    assert other.torch.state["history"]["steps"] == 2
    assert isinstance(other.torch.state["bias"], torch.Tensor)


def test_other_groups_than_before_keep_theirs(tmp_path: Path) -> None:
    network = model()
    optimizer = inner(network, Counting)
    train(network, optimizer.torch, 2)
    write_state(tmp_path / "state", optimizer.take(is_copy=True))
    other = inner(network, lambda p: Counting([{"params": p[:2]}, {"params": p[2:]}]))
    other.put(read_state(tmp_path / "state"))
    assert [group["k"] for group in other.torch.param_groups] == [0, 0]
    assert other.torch.state["history"]["steps"] == 2


def test_what_has_no_form_is_left_out_by_name(tmp_path: Path) -> None:
    network = model()
    optimizer = inner(network, OPTIMIZERS["sgd"])
    train(network, optimizer.torch, 1)
    parameter = next(network.parameters())
    optimizer.torch.state[parameter]["history"] = [1, 2]
    optimizer.torch.state[parameter]["count"] = 7
    write_state(tmp_path / "state", optimizer.take(is_copy=True))
    state = read_state(tmp_path / "state")
    first = next(name for name, _ in network.named_parameters())
    assert state.left_out == [f"{first}/history"]
    assert state.scalars[f"{first}/count"] == 7


def test_a_function_of_the_model_is_refused_as_such() -> None:
    with pytest.raises(PlanError, match=r"called with that list, not with the model") as caught:
        inner(model(), lambda network: torch.optim.SGD(network.parameters(), lr=0.1))
    assert caught.value.field == "optimizer"

    def broken(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGDD(parameters, lr=0.1)  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="SGDD"):
        inner(model(), broken)


def part(moment: list[float], step: float, seen: int, **more: Any) -> OptimizerState:
    tensors = {
        "w/exp_avg": torch.tensor(moment),
        "w/step": torch.tensor(step),
        "w/product": torch.tensor(0.9**step),
        "w/hits": torch.tensor([seen, 1]),
        "s/exp_avg": torch.tensor(moment[0]),
    }
    return OptimizerState("Adam", tensors | more, {"w/seen": seen, "w/mode": f"after {seen}"})


SHAPES: dict[str, tuple[int, ...]] = {"w": (2,), "s": ()}


def test_a_rank_that_was_not_there_begins_with_the_weighted_mean_of_moments() -> None:
    parts = [(30.0, part([1.0, 2.0], 30.0, 3)), (10.0, part([5.0, -2.0], 10.0, 9))]
    mean = mean_state(parts, SHAPES)
    assert mean.tensors["w/exp_avg"].tolist() == [2.0, 1.0]
    assert mean.tensors["s/exp_avg"].item() == 2.0
    assert mean.tensors["w/exp_avg"].dtype == torch.float32
    assert mean.tensors["w/step"].item() == 30.0
    assert mean.tensors["w/hits"].tolist() == [9, 1]
    assert mean.tensors["w/product"].item() == pytest.approx(0.9**30)
    assert mean.scalars == {"w/seen": 9, "w/mode": "after 3"}


def test_parts_that_contributed_nothing_weigh_alike() -> None:
    mean = mean_state([(0.0, part([1.0, 2.0], 1.0, 1)), (0.0, part([3.0, 4.0], 1.0, 1))], SHAPES)
    assert mean.tensors["w/exp_avg"].tolist() == [2.0, 3.0]


def test_only_parts_that_have_a_tensor_count_for_it() -> None:
    extra = {"w/late": torch.tensor([8.0, 8.0], dtype=torch.bfloat16)}
    mean = mean_state([(30.0, part([1.0, 1.0], 1.0, 1)), (10.0, part([1.0, 1.0], 1.0, 1, **extra))], SHAPES)
    assert mean.tensors["w/late"].tolist() == [8.0, 8.0]
    assert mean.tensors["w/late"].dtype == torch.bfloat16


def test_what_is_no_state_is_refused_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors"):
        read_state(path)
