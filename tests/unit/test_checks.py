"""What a run needs of the user's parts: a bad one is refused with one clear message, an odd but good one passes."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flodl.errors import PlanError
from flodl.plan import build_plan
from flodl.rank.checks import (
    check_data,
    check_fit,
    check_loss,
    check_model,
    check_optimizer,
    check_parts,
    make_optimizer,
)
from flodl.rank.learning_rate import make_schedule
from flodl.rank.parts import Parts, build_parts

SAMPLES = TensorDataset(torch.zeros(10, 2))


def parts(**changes: Any) -> Parts:
    given = {
        "model": lambda: nn.Linear(2, 1),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "loss": lambda m, b: m(b[0]).mean(),
        "data": SAMPLES,
    }
    return build_parts({**given, **changes})


def refusal(check: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(PlanError) as caught:
        check(*arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 2
    assert message.splitlines()[1].startswith("Allowed: ")
    return message


# ---- what the launcher can see


def test_good_parts() -> None:
    check_parts(parts())
    check_parts(parts(model=nn.Identity, data=[1, 2, 3], loss=nn.Linear(1, 1).forward))


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("model", nn.Linear(1, 1), "model=lambda: Linear(...)"),
        ("optimizer", torch.optim.SGD([torch.zeros(1)], lr=0.1), "optimizer=lambda p:"),
        ("optimizer", torch.optim.LBFGS, "no closure"),
        ("loss", nn.CrossEntropyLoss, "loss=lambda m, b:"),
        ("loss", nn.CrossEntropyLoss(), "outputs and targets"),
    ],
    ids=["module", "optimizer", "LBFGS", "loss class", "loss module"],
)
def test_an_instance_where_a_function_is_wanted(name: str, part: object, says: str) -> None:
    if isinstance(part, torch.optim.Optimizer):
        # An optimizer cannot be called, which the parts see without torch.
        message = refusal(lambda: parts(**{name: part}))
    else:
        message = refusal(check_parts, parts(**{name: part}))
    assert message.startswith(f"{name} = ")
    assert says in message


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Lengthless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Unknown(Lengthless):
    def __len__(self) -> int:
        raise NotImplementedError("ask later")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Stream(), "exactly once"),
        (DataLoader(SAMPLES), "data=loader.dataset"),
        (iter([1, 2]), "no numbers"),
        ({"a": 1}, "no numbers"),
        ("samples", "no numbers"),
        (3, "no numbers"),
        (Lengthless(), "its length is unknown"),
        (Unknown(), "ask later"),
        ([], "it is empty"),
        (TensorDataset(torch.zeros(0, 2)), "it is empty"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_data_that_cannot_be_dealt_out(data: object, says: str) -> None:
    assert says in refusal(check_data, data, "data")
    assert refusal(check_data, data, "eval_data").startswith("eval_data = ")


def test_good_data() -> None:
    assert check_data(SAMPLES, "data") == 10
    assert check_data([0], "data") == 1
    assert check_data(range(7), "data") == 7
    assert check_data(torch.zeros(3, 2), "data") == 3


def test_a_plan_that_the_data_is_too_small_for() -> None:
    three = build_plan(batch_size=1, devices=["cpu"] * 3)
    assert "at most 2 ranks" in refusal(check_fit, three, 2)
    assert "at most 4" in refusal(check_fit, build_plan(batch_size=5, devices="cpu"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fit(three, 3)
        check_fit(build_plan(batch_size=1, devices="cpu"), 1)
    with pytest.warns(UserWarning, match="2 batches for 3 ranks"):
        check_fit(build_plan(batch_size=2, devices=["cpu"] * 3), 4)


# ---- what a rank has built


class Odd(nn.Module):
    """Everything unusual that works: ties, 0-dim, empty and strided parameters, buffers of other kinds."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2, dtype=dtype)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.line.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.strided = nn.Parameter(torch.zeros(4, 3, dtype=dtype).t())
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("limit", torch.full((2,), -math.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_odd_models_that_work(dtype: torch.dtype) -> None:
    model = Odd(dtype)
    assert check_model(model) is model


class DataParallel(nn.Linear):
    """A user's own class may have any name."""


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_models_wrapped_by_torch_distributed(process_group: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert "the model is wrapped in DistributedDataParallel" in refusal(check_model, wrapped)
    check_model(wrapped.module)
    check_model(DataParallel(2, 2))


def _with_parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("odd", nn.Parameter(tensor))
    return model


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: "net", "that came back"),
        (lambda: nn.Linear, "that came back"),
        (nn.Identity, "it has no parameters"),
        (_frozen, "every parameter is frozen"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "the model is wrapped in DataParallel"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "0 is wrapped in DataParallel"),
        (lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), "0.weight, 0.bias, 1.weight, 1.bias"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"),
        (lambda: _with_parameter(torch.zeros(2, dtype=torch.complex64)), "parameter odd is complex (torch.complex64)"),
        (lambda: _with_parameter(torch.eye(2).to_sparse()), "parameter odd is sparse (torch.sparse_coo)"),
        (
            lambda: _with_parameter(torch.zeros(2).to(torch.float8_e4m3fn)),
            "parameter odd is torch.float8_e4m3fn",
        ),
    ],
    ids=["str", "class", "none", "frozen", "DP", "inner DP", "lazy", "meta", "complex", "sparse", "float8"],
)
def test_models_that_cannot_be_trained(build: Callable[[], object], says: str) -> None:
    message = refusal(check_model, build())
    assert message.startswith("model = ")
    assert says in message


def test_a_lazy_model_that_has_seen_a_batch() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    assert "run one batch through it in model()" in refusal(check_model, model)
    model(torch.zeros(1, 2))
    check_model(model)


def test_the_optimizer_gets_the_trained_parameters() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    given: list[Any] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given.extend(parameters)
        return torch.optim.AdamW([{"params": parameters, "lr": 0.5}])

    made = make_optimizer(parts(optimizer=make), model)
    assert len(given) == 1
    assert given[0] is model.weight
    assert made.param_groups[0]["lr"] == 0.5


def test_optimizers_that_cannot_be_used() -> None:
    model = nn.Linear(2, 2)
    assert "optimizer = 'NoneType'" in refusal(check_optimizer, None, model)
    assert "optimizer = 'type'" in refusal(check_optimizer, torch.optim.SGD, model)
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7, 3))], lr=0.1)
    assert "1 of its parameters are not the model's, the first of shape (7, 3)" in refusal(
        check_optimizer, other, model
    )
    assert "no closure" in refusal(check_optimizer, torch.optim.LBFGS(model.parameters()), model)


def test_an_optimizer_over_some_parameters_is_warned_of() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    with pytest.warns(UserWarning, match=r"leaves out 0\.bias, 1\.weight, 1\.bias, 2\.weight, 2\.bias and 2 more"):
        check_optimizer(torch.optim.SGD([model[0].weight], lr=0.1), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_losses() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert check_loss(weight.sum()).ndim == 0
    assert check_loss(weight[:1]).numel() == 1
    assert math.isnan(check_loss(weight.sum() * math.nan).item()), "not finite is a matter of training"
    assert "loss = 'float'" in refusal(check_loss, 0.5)
    assert "loss = 'NoneType'" in refusal(check_loss, None)
    assert "loss = 'tuple'" in refusal(check_loss, (weight.sum(), 1))
    assert "tensor of shape (2,)" in refusal(check_loss, weight)
    assert "torch.int64" in refusal(check_loss, torch.tensor(1))
    assert "torch.complex64" in refusal(check_loss, torch.tensor(1j))
    assert "it has no gradient" in refusal(check_loss, weight.sum().detach())


def test_a_tuple_of_tensors_is_no_data_set_of_their_rows() -> None:
    words = refusal(check_data, (torch.zeros(10, 2), torch.zeros(10)), "data")
    assert "a tuple of 2 tensors has 2 items" in words
    assert "data=TensorDataset(...)" in words


# ---- the learning rate


def scheduled(scheduler: Any) -> Callable[[int], float]:
    """10 samples in batches of 4; a rate of 1, so that rate and factor are the same."""
    return make_schedule(scheduler, torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9), 4, 10).set


def test_no_scheduler() -> None:
    assert scheduled(None)(12345) == 1.0


def test_a_function_of_the_position() -> None:
    asked: list[int] = []

    def halving(position: int) -> float:
        asked.append(position)
        return 0.5 ** (position // 10)

    schedule = scheduled(halving)
    assert [schedule(position) for position in (0, 9, 25)] == [1.0, 1.0, 0.25]
    assert asked[1:] == [0, 9, 25]
    assert scheduled(lambda position: torch.tensor(0.5))(3) == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, None, "fast", True, torch.zeros(2)], ids=repr)
def test_a_factor_that_is_none(value: object) -> None:
    assert "at position 0" in refusal(scheduled, lambda position: value)
    later = scheduled(lambda position: 1.0 if position < 8 else value)
    assert later(4) == 1.0
    assert "at position 8" in refusal(later, 8)


def test_a_scheduler_class_that_wants_more_than_an_optimizer_is_refused_by_name() -> None:
    words = refusal(scheduled, lr_scheduler.StepLR)
    assert words.startswith("scheduler = ")
    assert "step_size" in words


def test_a_scheduler_that_ends_before_the_run_is_refused_by_name() -> None:
    short = scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=3))
    assert short(8) >= 0.0
    words = refusal(short, 14)
    assert "OneCycleLR fails at batch" in words
    assert "Tried to step" in words


def test_a_torch_scheduler_steps_once_per_batch_of_the_run() -> None:
    """10 samples in batches of 4: three batches an epoch, the last one short."""
    schedule = scheduled(lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1))
    positions = [0, 4, 8, 10, 14, 18, 20]
    assert [schedule(position) for position in positions] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])
    assert schedule(0) == 1.0, "an earlier position may be asked for again"


def test_a_torch_scheduler_is_the_same_as_in_a_plain_loop() -> None:
    def factory(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=6)

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    scheduler = factory(optimizer)
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = scheduled(factory)
        assert [schedule(position) for position in (18, 0, 4, 8, 10, 14)] == [expected[5], *expected[:5]]


CYCLES: dict[str, tuple[Any, Any]] = {
    "one cycle, adam": (
        lambda p: torch.optim.Adam([{"params": p[:1], "lr": 2e-3}, {"params": p[1:], "lr": 1e-3}]),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.01, 0.02], total_steps=12),
    ),
    "cyclic, sgd": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    ),
    "cosine with a floor": (
        lambda p: torch.optim.AdamW(p, lr=2e-3),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-4),
    ),
    "warm-up, then lambdas": (
        lambda p: torch.optim.RMSprop([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.2),
        lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1.0 / (step + 1), lambda step: 0.5**step]),
    ),
}


@pytest.mark.parametrize("case", CYCLES)
def test_a_torch_scheduler_sets_the_users_own_rates_and_momenta(case: str) -> None:
    """Seen: it was given an optimizer with a rate of 1, and its absolute rates came out as factors."""
    make, factory = CYCLES[case]
    mine, plain = (make([torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]) for _ in range(2))
    schedule, scheduler = make_schedule(factory, mine, 4, 10), factory(plain)
    keys = ("lr", "momentum", "betas")
    expected = []
    for _ in range(9):
        expected.append([{key: group[key] for key in keys if key in group} for group in plain.param_groups])
        plain.step()
        scheduler.step()
    schedule.check(28)
    assert [group["lr"] for group in mine.param_groups] == [
        group["lr"] for group in make([torch.zeros(2), torch.zeros(1)]).param_groups
    ]
    for batch in (8, 0, 3, 5, 1):
        factor = schedule.set(batch // 3 * 10 + batch % 3 * 4)
        found = [{key: group[key] for key in keys if key in group} for group in mine.param_groups]
        assert found == expected[batch]
        assert factor == pytest.approx(
            found[0]["lr"] / float(make([torch.zeros(2), torch.zeros(1)]).param_groups[0]["lr"])
        )


def test_a_scheduler_class_that_needs_nothing_else() -> None:
    assert scheduled(lr_scheduler.ConstantLR)(0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (lr_scheduler.ReduceLROnPlateau, "driven by a metric"),
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5), "driven by a metric"),
        (lambda optimizer: optimizer.param_groups[0]["lr"], "it returned float for an optimizer"),
        (lambda optimizer: optimizer.no_such_thing, "as a function of the position it raised AttributeError"),
        (lambda: 1.0, "as one of an optimizer TypeError"),
    ],
    ids=["plateau class", "plateau", "number", "attribute", "no argument"],
)
def test_schedulers_that_cannot_be_used(scheduler: Any, says: str) -> None:
    message = refusal(scheduled, scheduler)
    assert message.startswith("scheduler = ")
    assert says in message


def test_a_scheduler_instance() -> None:
    made = lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)
    assert "not a function that makes one" in refusal(scheduled, made)
