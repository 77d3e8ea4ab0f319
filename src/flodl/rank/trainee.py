"""A model in training on one device: everything that one batch takes, alone or as a rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from flodl.devices.emulated import Pad, sharpen_sleep
from flodl.errors import RunFailed
from flodl.plan import Plan
from flodl.rank.callbacks import BatchInfo, Callbacks
from flodl.rank.checks import check_data, check_model
from flodl.rank.evaluation import Evaluation
from flodl.rank.feed import Feed
from flodl.rank.inner_optimizer import InnerOptimizer
from flodl.rank.items import Source
from flodl.rank.learning_rate import make_schedule
from flodl.rank.leases import Lease
from flodl.rank.order import Order
from flodl.rank.parts import Parts
from flodl.rank.seeds import derive, plant
from flodl.rank.step import Step, StepSettings
from flodl.rank.tally import Trained

SCHEDULED_AHEAD = 10_000
"""Batches whose learning rate is looked at before the first."""


class StepCounter(Protocol):
    """Where steps are counted for others to see."""

    def start_step(self) -> None: ...
    def finish_step(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Which rank of the plan this is."""

    rank: int
    device: torch.device


class Trainee:
    """Built once per process. The loop calls train() with its leases; close() ends what was started for it."""

    def __init__(self, plan: Plan, parts: Parts, rank: int) -> None:
        """Builds model and optimizer under the run's seed. Raises PlanError for parts that cannot be trained."""
        self._plan = plan
        device = plan.cluster.device_of(rank)
        self.place = Place(rank, torch.device(device.torch_name))
        length = check_data(parts.data, "data")
        self.order = Order(plan.seed, length, plan.data.batch_size, plan.data.samples_per_epoch(length))
        plant(derive(plan.seed, "model"), self.place.device)
        self.model: nn.Module = check_model(parts.model()).to(self.place.device)
        self.optimizer = InnerOptimizer(parts, self.model)
        self._step = Step(self.model, self.optimizer.torch, parts.loss, self._step_settings(parts))
        self._feed = Feed(
            Source(parts.data, self.order, parts.collate, parts.worker_init), plan.data.loader, self.place.device
        )
        self._callbacks = Callbacks(parts.callbacks)
        self._evaluation = self._make_evaluation(parts)
        self._pad = Pad(device) if device.is_emulated else None
        if self._pad is not None:
            sharpen_sleep()
        self.counter: StepCounter | None = None
        self.steps = 0
        self.model.train()

    @property
    def evaluates(self) -> bool:
        return self._evaluation is not None

    @property
    def raw_over_pad(self) -> int:
        """Steps of an emulated device whose real work took longer than they should have lasted."""
        return self._pad.raw_over_pad if self._pad is not None else 0

    def follow(self, upcoming: Iterable[Lease]) -> None:
        self._feed.follow(upcoming)

    def train(self, lease: Lease, upcoming: Iterable[Lease]) -> Trained:
        """One batch, padded on an emulated device. The wait for data is apart; reading ahead goes on meanwhile."""
        fed = self._feed.take(lease)
        self._feed.follow(upcoming)
        position = self.order.position(lease)
        started = time.perf_counter()
        if self.counter is not None:
            self.counter.start_step()
        loss = self._step.train(lease, fed.batch)
        over_before = self.raw_over_pad
        if self._pad is not None:
            self._pad.hold(started, position / self._last_position(), derive(self._plan.seed, "pad", position))
        if self.counter is not None:
            self.counter.finish_step()
        compute_ms = 1e3 * (time.perf_counter() - started)
        self.steps += 1
        samples = self.order.samples(lease)
        pause_ms = 0.0
        if self._callbacks.want_batches:
            info = BatchInfo(self.place.rank, lease.epoch, lease.index, position, self.steps, loss, samples)
            pause_ms = self._callbacks.batch(info)
        is_over = self.raw_over_pad > over_before
        return Trained(loss, samples, compute_ms, fed.data_ms, is_over, self._step.factor, pause_ms)

    def forget(self) -> None:
        self.optimizer.forget()

    def evaluate(self, epoch: int) -> dict[str, float]:
        """Metrics of the model as it stands. Raises RunFailed where the parts have no evaluate."""
        if self._evaluation is None:
            raise RunFailed("an evaluation was asked for, and the parts have no evaluate\nGive evaluate and eval_data.")
        metrics = self._evaluation.run(self.model, epoch)
        self._callbacks.evaluated(epoch, metrics)
        return metrics

    def close(self) -> None:
        self._feed.close()

    def _last_position(self) -> int:
        whole = self._plan.data.epochs * self.order.samples_per_epoch
        return max(1, min(whole, self._plan.data.samples or whole))

    def _step_settings(self, parts: Parts) -> StepSettings:
        schedule = make_schedule(
            parts.scheduler, self.optimizer.torch, self._plan.data.batch_size, self.order.samples_per_epoch
        )
        # One that ends before the run does is found before the run begins, unless that itself would take seconds.
        schedule.check(min(self._last_position() - 1, SCHEDULED_AHEAD * self._plan.data.batch_size))
        return StepSettings(
            order=self.order,
            micro_batch=self._plan.data.micro_batch_of(self.place.rank),
            clip_grad_norm=self._plan.training.clip_grad_norm,
            schedule=schedule,
            device=self.place.device,
        )

    def _make_evaluation(self, parts: Parts) -> Evaluation | None:
        if parts.evaluate is None:
            return None
        return Evaluation(
            evaluate=parts.evaluate,
            data=parts.eval_data,
            batch_size=self._plan.data.batch_size,
            collate=parts.collate,
            seed=self._plan.seed,
            device=self.place.device,
        )
