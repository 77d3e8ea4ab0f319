"""One training step: seeds, learning rate, pieces, clipping; callbacks and evaluation around it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flodl.errors import PlanError, RunFailed
from flodl.rank.callbacks import BatchInfo, Callbacks
from flodl.rank.evaluation import Evaluation
from flodl.rank.learning_rate import Schedule, make_schedule
from flodl.rank.leases import Lease
from flodl.rank.micro_batches import split
from flodl.rank.order import Order
from flodl.rank.seeds import derive, plant, undisturbed
from flodl.rank.step import Step, StepSettings

CPU = torch.device("cpu")
ORDER = Order(seed=11, length=100, batch_size=8, samples_per_epoch=100)
LAST = Lease(0, 12)  # holds 4 samples
PINNED = 8611154219819327717  # a change of it changes every run that is resumed


def settings(**changes: Any) -> StepSettings:
    base: dict[str, Any] = {
        "order": ORDER,
        "micro_batch": 8,
        "clip_grad_norm": None,
        "schedule": Schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "device": CPU,
    }
    return StepSettings(**(base | changes))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def made(rate: float = 0.1, dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    plant(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_step_is_what_torch_does_by_hand() -> None:
    model, optimizer = made()
    value = Step(model, optimizer, loss, settings()).train(Lease(0, 0), batch())
    reference, by_hand = made()
    expected = loss(reference, batch())
    expected.backward()
    by_hand.step()
    assert value == pytest.approx(float(expected.detach()))
    assert torch.equal(weights(model), weights(reference))


@pytest.mark.parametrize(("samples", "micro"), [(8, 3), (8, 1), (4, 3)])
def test_pieces_add_up_to_the_gradient_of_the_whole_batch(samples: int, micro: int) -> None:
    lease = Lease(0, 0) if samples == 8 else LAST
    results = []
    for size in (8, micro):
        model, optimizer = made()
        value = Step(model, optimizer, loss, settings(micro_batch=size)).train(lease, batch(samples))
        results.append((value, weights(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-7)


def test_dropout_belongs_to_the_batch_whatever_was_drawn_before() -> None:
    results = []
    for noise in (0, 13):
        model, optimizer = made(dropout=0.5)
        torch.rand(noise + 1)
        Step(model, optimizer, loss, settings()).train(Lease(0, 3), batch())
        results.append(weights(model))
    model, optimizer = made(dropout=0.5)
    Step(model, optimizer, loss, settings()).train(Lease(0, 4), batch())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], weights(model))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rate_follows_the_position_from_each_groups_own_base(as_tensor: bool) -> None:
    model = nn.Linear(3, 2)
    rates: list[Any] = [torch.tensor(0.5), torch.tensor(0.25)] if as_tensor else [0.5, 0.25]
    optimizer = torch.optim.SGD([{"params": [p], "lr": r} for p, r in zip(model.parameters(), rates, strict=True)])
    step = Step(
        model, optimizer, loss, settings(schedule=make_schedule(lambda position: position / 64, optimizer, 8, 100))
    )
    for index in (4, 8):
        step.train(Lease(0, index), batch())
        assert [float(group["lr"]) for group in optimizer.param_groups] == [index / 16, index / 32]
        assert step.factor == index / 8


def test_gradients_are_clipped_to_the_norm() -> None:
    model, optimizer = made(rate=1.0)
    before = weights(model)
    Step(model, optimizer, loss, settings(clip_grad_norm=1e-3)).train(Lease(0, 0), batch())
    assert float((weights(model) - before).norm()) == pytest.approx(1e-3, rel=1e-2)


def test_a_group_that_joins_while_training_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, optimizer, loss, settings(schedule=Schedule(optimizer)))
    step.train(Lease(0, 0), batch())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RunFailed, match="2 parameter groups, and was made with 1"):
        step.train(Lease(0, 1), batch())


@pytest.mark.parametrize(
    "wrong",
    [lambda m, b: 1.0, lambda m, b: m(b[0]), lambda m, b: m(b[0]).mean().detach()],
    ids=["a number", "not reduced", "detached"],
)
def test_a_wrong_loss_is_refused_by_name(wrong: Any) -> None:
    model, optimizer = made()
    with pytest.raises(PlanError, match="loss"):
        Step(model, optimizer, wrong, settings()).train(Lease(0, 0), batch())


def test_a_batch_is_cut_through_its_structure() -> None:
    whole = {"x": torch.arange(5), "pair": (torch.arange(10).reshape(5, 2), ["a", "b", "c", "d", "e"]), "scale": 2.0}
    pieces = list(split(whole, 5, 2))
    assert [round(piece.share, 6) for piece in pieces] == [0.4, 0.4, 0.2]
    assert pieces[1].batch["x"].tolist() == [2, 3]
    assert pieces[1].batch["pair"][0].tolist() == [[4, 5], [6, 7]]
    assert pieces[2].batch["pair"][1] == ["e"]
    assert pieces[2].batch["scale"] == 2.0


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"mask": torch.zeros(3, 3)}, r"batch\['mask'\] has shape \[3, 3\], not 4 in dimension 0"),
        ((torch.zeros(4), torch.tensor(1.0)), r"batch\[1\] has shape \[\], not 4"),
        ((torch.zeros(4), object()), r"batch\[1\] is a object"),
    ],
    ids=["another length", "no dimension", "unknown type"],
)
def test_a_part_that_cannot_be_cut_is_named(part: Any, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        list(split(part, 4, 2))


def test_seeds_differ_by_purpose_and_number_and_never_by_process() -> None:
    assert derive(0, "step", 5) == PINNED
    assert len({derive(seed, purpose, n) for seed in (0, 1) for purpose in ("a", "b") for n in (0, 1)}) == 8


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    plant(9)
    expected = (random.random(), np.random.rand(), float(torch.rand(())))
    plant(9)
    with undisturbed():
        plant(77)
        random.random(), np.random.rand(), torch.rand(3)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_evaluation_leaves_modes_and_generators_as_they_were() -> None:
    model, _ = made(dropout=0.5)
    model[1].eval()
    plant(4)
    expected = float(torch.rand(()))
    plant(4)

    def evaluate(module: nn.Module, loader: Any) -> dict[str, Any]:
        assert not module.training
        assert not torch.is_grad_enabled()
        return {"items": sum(len(x) for x in loader), "draw": torch.rand(())}

    evaluation = Evaluation(evaluate, list(range(10)), 4, None, 0, CPU)
    first = evaluation.run(model, 1)
    assert first["items"] == 10.0
    assert float(torch.rand(())) == expected
    assert first == evaluation.run(model, 1) != evaluation.run(model, 2)
    assert model.training
    assert not model[1].training


@pytest.mark.parametrize(
    ("answer", "words"),
    [(3, "returned a int"), ({"acc": "good"}, "'acc' = 'good'"), ({"round": 3.0}, "'round', .* are the run's own")],
    ids=["int", "word", "own name"],
)
def test_metrics_that_are_no_numbers_are_refused(answer: Any, words: str) -> None:
    evaluation = Evaluation(lambda model, loader: answer, [1], 1, None, 0, CPU)
    with pytest.raises(RunFailed, match=words):
        evaluation.run(nn.Linear(1, 1), 0)


def test_callbacks_are_told_of_batches_and_evaluations() -> None:
    told: list[Any] = []

    class Watcher:
        def on_batch(self, info: BatchInfo) -> None:
            told.append(("object", info.index))

        def on_evaluated(self, epoch: int, metrics: dict[str, float]) -> None:
            told.append((epoch, metrics))

    callbacks = Callbacks((Watcher(), lambda info: told.append(("function", info.loss))))
    assert callbacks.batch(BatchInfo(0, 1, 2, 3, 4, 0.5, 8)) >= 0.0
    callbacks.evaluated(1, {"a": 1.0})
    assert told == [("object", 2), ("function", 0.5), (1, {"a": 1.0})]
    assert not Callbacks(()).want_batches
