"""A batch cut along its samples, for devices that cannot take it whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from flodl.errors import RunFailed

_LEAVES = str | bytes | int | float | complex


class Piece(NamedTuple):
    """Part of a batch, and its share of the batch's samples."""

    batch: Any
    share: float


def split(batch: Any, samples: int, micro_batch: int) -> Iterator[Piece]:
    """Pieces of at most micro_batch samples; the whole batch in one where that is no less than `samples`.

    Tensors, and sequences of plain values, are cut along dimension 0, which must be `samples` long; tuples, lists and
    mappings are followed; single plain values are repeated. Raises RunFailed naming the part that cannot be cut.
    """
    if micro_batch >= samples:
        yield Piece(batch, 1.0)
        return
    for start in range(0, samples, micro_batch):
        stop = min(start + micro_batch, samples)
        yield Piece(_cut(batch, samples, slice(start, stop), "batch"), (stop - start) / samples)


def _cut(part: Any, samples: int, where: slice, path: str) -> Any:
    if isinstance(part, torch.Tensor):
        if part.dim() == 0 or part.shape[0] != samples:
            raise _uncuttable(path, f"has shape {list(part.shape)}, not {samples} in dimension 0")
        return part[where]
    if part is None or isinstance(part, _LEAVES):
        return part
    if isinstance(part, Mapping):
        return {key: _cut(value, samples, where, f"{path}[{key!r}]") for key, value in part.items()}
    if isinstance(part, tuple | list):
        if len(part) == samples and all(isinstance(value, _LEAVES) for value in part):
            return part[where]
        pieces = [_cut(value, samples, where, f"{path}[{number}]") for number, value in enumerate(part)]
        return type(part)(*pieces) if hasattr(part, "_fields") else type(part)(pieces)
    raise _uncuttable(path, f"is a {type(part).__name__}")


def _uncuttable(path: str, why: str) -> RunFailed:
    return RunFailed(
        f"micro_batch: {path} {why}, so the batch cannot be cut along its samples\n"
        "Leave micro_batch out, or collate tensors whose dimension 0 counts samples."
    )
