"""A rank's part in checkpoints: its optimizer's state, and, where it is asked to, the committed consensus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flodl.checkpoint.document import CONSENSUS, Document, optimizer_file, read_document
from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.tensors import write_image
from flodl.errors import CheckpointError
from flodl.protocol.messages import Commit, LayoutSpec, Saved
from flodl.rank.optimizer_state import (
    OptimizerState,
    mean_state,
    read_state,
    write_state,
)
from flodl.rank.trainee import Trainee

ReadCommitted = Callable[[int, int, int], bytes]
"""(buffer, offset, size) → bytes of the committed θ that stands in this buffer of the host."""


class Saving:
    """What the loop calls to save and to begin from what was saved. Every call is made at a step boundary."""

    def __init__(self, trainee: Trainee, layout: LayoutSpec, read_committed: ReadCommitted) -> None:
        self._trainee = trainee
        self._layout = layout
        self._read_committed = read_committed
        self._is_warned = False

    def keep(self) -> OptimizerState:
        """The optimizer's state as it is now, whatever is trained afterwards: a copy."""
        return self._trainee.optimizer.take(is_copy=True)

    def save(self, commit: Commit, kept: OptimizerState | None) -> list[Saved]:
        """Writes what the commit asks for; kept: as of the seal, None where nothing was trained since.

        Never raises for a disk that is full or read-only: the answer says so.
        """
        directory = Path(commit.save)
        name = optimizer_file(self._trainee.place.rank)
        answers = []
        if commit.saves_consensus:
            answers.append(_answer(commit.round, CONSENSUS, lambda: self._write_consensus(directory, commit)))
        answers.append(_answer(commit.round, name, lambda: self._write_state(directory / name, kept)))
        return answers

    def restore_state(self, path: str) -> None:
        """The optimizer remembers what it remembered when the checkpoint was made. Raises CheckpointError."""
        restore_optimizer(self._trainee, Path(path))

    def restore_consensus(self, path: str) -> None:
        """The model holds the checkpoint's consensus, bit for bit. Raises CheckpointError."""
        wanted = {tensor.name for tensor in self._layout.tensors}
        load_tensors(self._trainee.model, Path(path) / CONSENSUS, wanted)

    def _write_consensus(self, directory: Path, commit: Commit) -> FileDigest:
        directory.mkdir(parents=True, exist_ok=True)
        metadata = {"round": str(commit.round), "hash": f"{commit.hash:016x}"}
        return write_image(
            directory / CONSENSUS,
            self._layout,
            metadata,
            lambda offset, size: self._read_committed(commit.buffer, offset, size),
        )

    def _write_state(self, path: Path, kept: OptimizerState | None) -> FileDigest:
        state = kept if kept is not None else self._trainee.optimizer.take(is_copy=False)
        self._is_warned = warn_of_left_out(state, self._is_warned)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_state(path, state)


def restore_optimizer(trainee: Trainee, path: Path) -> None:
    """This rank's own part, or the mean of all parts for a rank that had none. Raises CheckpointError.

    Another class of optimizer begins anew, and says so.
    """
    document = read_document(path)
    state = _state_for(trainee, path, document)
    if state is None:
        return
    kind = trainee.optimizer.kind
    if state.kind != kind:
        _say(f"the checkpoint holds the state of {state.kind}, and the optimizer is {kind} now: it begins anew")
        return
    trainee.optimizer.put(state)


def load_tensors(model: nn.Module, path: Path, wanted: set[str] | None = None) -> None:
    """Copies the tensors of these names (None: all that the file holds) into the model's own.

    Raises CheckpointError naming what does not fit.
    """
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            there = set(file.keys())
            wanted = there if wanted is None else wanted
            missing = sorted(wanted - there)
            if missing:
                raise CheckpointError(f"{path} holds no tensor {missing[0]}", path=str(path))
            for name in sorted(wanted):
                tensor = file.get_tensor(name)
                place = places[name]
                if (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                    raise CheckpointError(f"{path} holds another {name} than the model", path=str(path))
                place.copy_(tensor)
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", path=str(path)) from error


def warn_of_left_out(state: OptimizerState, is_warned: bool) -> bool:
    """Says once what of the optimizer's state has no form in a checkpoint."""
    if state.left_out and not is_warned:
        more = f" and {len(state.left_out) - 1} more" if len(state.left_out) > 1 else ""
        _say(f"checkpoints leave out {state.left_out[0]}{more} of {state.kind}: neither a dense tensor nor a number")
    return is_warned or bool(state.left_out)


def _state_for(trainee: Trainee, path: Path, document: Document) -> OptimizerState | None:
    own = optimizer_file(trainee.place.rank)
    if document.has(own):
        return read_state(path / own)
    parts = [
        (float(rank.batches), read_state(path / optimizer_file(rank.rank)))
        for rank in document.ranks
        if document.has(optimizer_file(rank.rank))
    ]
    if not parts:
        return None
    kinds = {state.kind for _, state in parts}
    if len(kinds) > 1:
        _say(f"the checkpoint holds the states of {', '.join(sorted(kinds))}: this rank's optimizer begins anew")
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in trainee.model.named_parameters()}
    return mean_state(parts, shapes)


def _answer(round: int, name: str, write: Callable[[], FileDigest]) -> Saved:
    try:
        written = write()
    except OSError as error:
        return Saved(round, name, "", error=f"{name}: {error.strerror or error}")
    return Saved(round, name, written.sha256, written.bytes)


def _say(words: str) -> None:
    print(f"flodl: {words}", file=sys.stderr)
