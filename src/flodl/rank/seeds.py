"""Every random number of a run follows from its seed and from what it is for, never from who draws it or when."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A seed below 2⁶³ for one purpose; the same in every process and Python version."""
    text = ":".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def plant(seed: int, device: torch.device | None = None) -> None:
    """Seeds Python's, numpy's (where it is in use) and torch's generators, the given GPU's among them."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class _Generators:
    python: object
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None


@contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on afterwards as if nothing had been."""
    kept = _capture(device)
    try:
        yield
    finally:
        random.setstate(kept.python)  # type: ignore[arg-type]
        if kept.numpy is not None:
            sys.modules["numpy"].random.set_state(kept.numpy)
        torch.default_generator.set_state(kept.cpu)
        if kept.cuda is not None:
            torch.cuda.set_rng_state(kept.cuda, device if device is not None else "cuda")


def _capture(device: torch.device | None) -> _Generators:
    numpy = sys.modules.get("numpy")
    on_gpu = device is not None and device.type == "cuda"
    return _Generators(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        cpu=torch.default_generator.get_state(),
        cuda=torch.cuda.get_rng_state(device) if on_gpu and device is not None else None,
    )
