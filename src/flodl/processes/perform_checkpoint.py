"""SaveVelocity, FinishCheckpoint and DropCheckpoint: the launcher's part in a checkpoint, and what makes it whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.checkpoint.document import CONSENSUS, FORMAT, Document, EpochRecord, RankRecord
from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.folder import CheckpointFolder
from flodl.checkpoint.velocity import VELOCITY, write_velocity
from flodl.errors import CheckpointError, NativeError
from flodl.processes.consensus import write_consensus
from flodl.processes.perform_memory import MemoryPerformer
from flodl.protocol.effects import CheckpointEnded, DropCheckpoint, FinishCheckpoint, SaveVelocity


@dataclass(frozen=True)
class Origin:
    """Which run saves. plan: as plain values."""

    run: str
    plan: dict[str, Any]
    world_size: int


class CheckpointPerformer:
    """Never raises for a disk that is full or read-only: the run goes on without that checkpoint."""

    def __init__(self, folder: CheckpointFolder, origin: Origin, memory: MemoryPerformer) -> None:
        self._folder = folder
        self._origin = origin
        self._memory = memory
        self._velocity: FileDigest | None = None
        self._fault = ""

    def save_velocity(self, effect: SaveVelocity) -> None:
        """At once: the next commit changes it. What goes wrong is told when the checkpoint is to be finished."""
        self._velocity, self._fault = None, ""
        velocity, layout = self._memory.read_velocity(), self._memory.layout
        if not velocity or layout is None:
            return
        directory = Path(effect.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._velocity = write_velocity(directory / VELOCITY, layout, velocity)
        except OSError as error:
            self._fault = f"{VELOCITY}: {error.strerror or error}"

    def finish(self, effect: FinishCheckpoint) -> CheckpointEnded:
        """Writes what the host is to write, and renames."""
        began = time.monotonic()
        try:
            if self._fault:
                raise CheckpointError(self._fault)
            path = self._folder.finish(effect.number, self._document(effect))
        except OSError as error:
            self._folder.drop(effect.number)
            return CheckpointEnded(effect.round, error=error.strerror or str(error))
        except (CheckpointError, NativeError) as error:
            self._folder.drop(effect.number)
            return CheckpointEnded(effect.round, error=str(error).partition("\n")[0])
        return CheckpointEnded(effect.round, str(path), "", time.monotonic() - began)

    def drop(self, effect: DropCheckpoint) -> None:
        self._folder.drop(effect.number)

    def close(self) -> None:
        """What the run's end left half-written."""
        self._folder.remove_own()

    def _document(self, effect: FinishCheckpoint) -> Document:
        state = effect.state
        files = [FileDigest(file.name, file.digest, file.size) for file in effect.files]
        if effect.writes_consensus:
            files.append(self._write_consensus(effect))
        if self._velocity is not None:
            files.append(self._velocity)
        return Document(
            format=FORMAT,
            run=self._origin.run,
            round=effect.number,
            plan=self._origin.plan,
            layout=state["layout"],
            data=state["data"],
            world_size=self._origin.world_size,
            contributed=state["contributed"],
            quarantined=state["quarantined"],
            epochs=tuple(EpochRecord(**epoch) for epoch in state["epochs"]),
            anchor=state["anchor"],
            ranks=tuple(RankRecord(**rank) for rank in state["ranks"]),
            files=tuple(sorted(files, key=lambda file: file.name)),
        )

    def _write_consensus(self, effect: FinishCheckpoint) -> FileDigest:
        committed, layout = self._memory.committed, self._memory.layout
        if committed is None or layout is None or committed.round != effect.round:
            raise CheckpointError("the rank that was to write the consensus is lost, and another round stands")
        partial = self._folder.partial(effect.number)
        partial.mkdir(parents=True, exist_ok=True)
        return write_consensus(partial / CONSENSUS, layout, committed, self._memory.read_committed)
