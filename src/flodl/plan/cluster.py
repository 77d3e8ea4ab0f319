"""The ranks of a run: one device each, and what is done when one of them fails or falls silent."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flodl.plan.device import ALLOWED, Device, parse_device
from flodl.plan.limits import Either, Maybe, Real, Refusal, Rule, Whole
from flodl.plan.refusal import refused
from flodl.plan.section import Section, setting

MOST_RANKS = 4096


@dataclass(frozen=True)
class _DeviceWords:
    """Shape only; what each word means is checked by parse_device, whose message is more exact."""

    @property
    def allowed(self) -> str:
        return f'"auto", one device, or a list with one device per rank; a device is {ALLOWED}'

    def accept(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise Refusal
        for word in value:
            parse_device(word)
        return tuple(value)


_SHARE: Rule = Real(above=0.0, most=1.0)


@dataclass(frozen=True)
class ClusterPlan(Section):
    """World size is the number of devices. Times in seconds."""

    devices: tuple[str, ...] = setting(
        _DeviceWords(),
        'One device per rank; a number of ranks on one processor is written ["cpu"] * 3.',
        default=("cpu",),
    )
    respawn: int = setting(Whole(0, 1000), "How often a rank that died is started again.", default=3)
    max_failures: int | float | None = setting(
        Maybe(Either(Whole(0), _SHARE), "no limit"),
        "Deaths after which the run is saved and ended: a count, or, as a fraction, a share of all ranks.",
        default=None,
    )
    detect_s: float = setting(
        Real(least=0.5, most=3600.0), "A rank that is silent for so long counts as dead.", default=5.0
    )
    stall_s: float | None = setting(
        Maybe(Real(above=0.0, most=604800.0), "60 s or 20 of its own slow steps, whichever is more"),
        "A rank that makes no step for so long is ended and restarted; the time of its first batch, evaluations and "
        "checkpoints does not count, that of a callback after a batch does: raise it for one that takes long.",
        default=None,
    )
    debug_rank: int | None = setting(
        Maybe(Whole(0), "none"), "The rank that runs under pdb, without limits.", default=None
    )
    eval_rank: int | None = setting(Maybe(Whole(0), "the fastest"), "The rank that evaluates.", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size > MOST_RANKS:
            raise refused("devices", f"{self.world_size} devices", f"at most {MOST_RANKS}")
        for name, rank in (("debug_rank", self.debug_rank), ("eval_rank", self.eval_rank)):
            if rank is not None and rank >= self.world_size:
                raise refused(name, rank, f"a rank from 0 to {self.world_size - 1}")
        gpus = [word for word in self.devices if parse_device(word).kind == "cuda"]
        if gpus and self.world_size > 1:
            raise refused(
                "devices",
                list(self.devices),
                "one GPU alone, or cpu and emulated devices: GPUs among several ranks are not in this version",
            )

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def device_of(self, rank: int) -> Device:
        return parse_device(self.devices[rank])


def resolve_devices(value: Any, count_gpus: Callable[[], int]) -> tuple[str, ...]:
    """The user's `devices` as one word per rank. count_gpus is asked only for "auto". Raises PlanError."""
    if isinstance(value, str):
        if value == "auto":
            return _automatic(count_gpus())
        parse_device(value)
        return (value,)
    count = _whole(value)
    if count is not None:
        if count < 1:
            raise refused("devices", count, 'a world size of 1 or more, written as a list such as ["cpu"] * 3')
        raise refused("devices", count, f'a list with one device per rank: ["cpu"] * {count}')
    if isinstance(value, list | tuple):
        if not value:
            raise refused("devices", list(value), 'at least one device (world size 0 trains nothing): ["cpu"] * 2')
        return tuple(value)
    raise refused("devices", value, _DeviceWords().allowed)


def _whole(value: Any) -> int | None:
    return None if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def _automatic(gpus: int) -> tuple[str, ...]:
    if gpus > 1:
        names = ", ".join(f"cuda:{index}" for index in range(gpus))
        raise refused(
            "devices",
            "auto",
            f'one device by name, such as "cuda:0": this machine has {names}, and several GPUs '
            "at once are not in this version",
        )
    return ("cuda:0",) if gpus == 1 else ("cpu",)
