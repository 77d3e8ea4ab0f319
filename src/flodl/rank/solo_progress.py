"""How far a run alone has come: what is left of each epoch, the epochs so far, and its checkpoints."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from flodl.averaging.consensus import save_consensus
from flodl.averaging.layout import build_layout
from flodl.checkpoint.document import CONSENSUS, FORMAT, Document, EpochRecord, RankRecord, optimizer_file
from flodl.checkpoint.files import digest_file
from flodl.checkpoint.start import Start
from flodl.errors import CheckpointError
from flodl.plan import Plan, plan_to_dict
from flodl.protocol import signatures
from flodl.protocol.ledger import Ledger, epoch_sizes
from flodl.protocol.messages import BatchRange
from flodl.rank.data_signature import data_signature
from flodl.rank.optimizer_state import write_state
from flodl.rank.parts import Parts
from flodl.rank.saving import load_tensors, restore_optimizer, warn_of_left_out
from flodl.rank.trainee import Trainee

_ALONE = (0, 0)


class SoloProgress:
    """Closed epochs count as rounds: alone there are none. degraded: what went less well than planned, in sentences."""

    def __init__(self, plan: Plan, parts: Parts, trainee: Trainee, start: Start) -> None:
        """Goes on from the start's checkpoint. Raises CheckpointError naming what does not fit."""
        order = trainee.order
        sizes = epoch_sizes(
            order.batches_per_epoch, plan.data.epochs, order.samples_per_epoch, plan.data.samples, order.batch_size
        )
        self._plan = plan
        self._trainee = trainee
        self._start = start
        self._is_warned = False
        self._batches = 0
        self._closed_here = 0
        self._ledger = Ledger(sizes)
        self.size = sum(sizes)
        self.batches_per_epoch = order.batches_per_epoch
        self.epochs = [EpochRecord(number, 0.0, 0) for number in range(len(sizes))]
        self.degraded = list(start.warnings)
        self._first = 0
        if start.checkpoint is not None or start.folder is not None:
            self._layout = build_layout(trainee.model).spec
            self._averaged = tuple(tensor.name for tensor in self._layout.tensors)
            self._data = data_signature(parts.data, plan.seed, plan.data.check).spec
        if start.checkpoint is not None:
            self._restore(start.checkpoint.path, start.checkpoint.document)

    @property
    def is_over(self) -> bool:
        return self._ledger.is_complete

    @property
    def epoch(self) -> int:
        """The lowest that is not closed."""
        return self._ledger.current_epoch

    def lease(self) -> tuple[BatchRange, ...]:
        """What is left of this epoch, in order."""
        return self._ledger.grant(_ALONE, self._ledger.unsettled_in(self.epoch))

    def close(self, record: EpochRecord) -> float:
        """This epoch is trained. Saves if that is due; returns the seconds that it took."""
        self.epochs[record.epoch] = record
        count = self._ledger.held(_ALONE)
        self._batches += count
        self._closed_here += 1
        self._ledger.seal(_ALONE, count)
        self._ledger.commit([_ALONE])
        every = self._plan.checkpoint.every_epochs
        if self._start.folder is None or not (self.is_over or (record.epoch + 1) % every == 0):
            return 0.0
        began = time.perf_counter()
        self._save()
        return time.perf_counter() - began

    def stop(self, record: EpochRecord, count: int) -> str:
        """The run ends after so many batches of this lease: they are saved. Returns what is kept, in words."""
        self.epochs[record.epoch] = record
        self._batches += count
        self._ledger.seal(_ALONE, count)
        self._ledger.forfeit(_ALONE)
        self._ledger.commit([_ALONE])
        self._closed_here += 1
        failures = len(self.degraded)
        self._save()
        if len(self.degraded) > failures:
            return f"the run was ended by the user; {self.degraded[-1]}"
        folder = self._start.folder
        assert folder is not None
        return f"the run was ended by the user; it goes on from {folder.directory} with resume=True"

    def _restore(self, path: Path, document: Document) -> None:
        wrong = signatures.differences(document.layout, self._layout)
        wrong += signatures.differences(document.data, self._data)
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit: {path}: {'; '.join(wrong)}\n"
                "Resume with the model and the data that it was made with, or begin anew in another folder.",
                path=str(path),
            )
        load_tensors(self._trainee.model, path / CONSENSUS)
        restore_optimizer(self._trainee, path)
        self._ledger.restore(document.contributed, document.quarantined)
        self._first = document.round
        for record in document.epochs[: len(self.epochs)]:
            self.epochs[record.epoch] = record

    def _save(self) -> None:
        """A failed save warns, and training goes on. What is not finite replaces no checkpoint that is."""
        folder = self._start.folder
        assert folder is not None
        if name := self._first_not_finite():
            self.degrade(f"no checkpoint after epoch {self.epoch - 1}: {name} is not finite; the earlier ones are kept")
            return
        number = self._first + self._closed_here
        partial = folder.partial(number)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            save_consensus(self._trainee.model, partial / CONSENSUS)
            state = self._trainee.optimizer.take(is_copy=False)
            self._is_warned = warn_of_left_out(state, self._is_warned)
            files = (digest_file(partial / CONSENSUS), write_state(partial / optimizer_file(0), state))
            folder.finish(
                number,
                Document(
                    format=FORMAT,
                    run=folder.run,
                    round=number,
                    plan=plan_to_dict(self._plan),
                    layout=self._layout,
                    data=self._data,
                    world_size=1,
                    contributed=self._ledger.contributed_ranges(),
                    quarantined=tuple(self._ledger.quarantined()),
                    epochs=tuple(self.epochs),
                    anchor=self._plan.cadence.anchor,
                    ranks=(RankRecord(0, self._plan.cluster.devices[0], self._batches),),
                    files=files,
                ),
            )
        except (OSError, CheckpointError) as error:
            folder.drop(number)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
            self.degrade(f"no checkpoint after epoch {self.epoch - 1}: {why}")

    def _first_not_finite(self) -> str:
        """The first tensor that would make the checkpoint worthless, or ''. Constants such as masks may be infinite."""
        model = self._trainee.model
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        names = (name for name in self._averaged if name in tensors and tensors[name].is_floating_point())
        return next((name for name in names if not bool(torch.isfinite(tensors[name]).all())), "")

    def degrade(self, words: str) -> None:
        """Says it at once, and in the result."""
        self.degraded.append(words)
        print(f"flodl: {words}", file=sys.stderr)
