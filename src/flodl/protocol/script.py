"""An earlier run's schedule as the parts that its ranks play in a replay: parsed and checked, nothing performed."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from flodl.protocol.effects import Contribution
from flodl.protocol.ledger import Holder
from flodl.protocol.messages import BatchRange


class Head(msgspec.Struct, tag="head", tag_field="kind", frozen=True):
    """The first record. threads: of torch in each rank ("rank") and of the averaging pool."""

    run: str
    plan: dict[str, Any]
    dataset_length: int
    threads: dict[str, int]
    versions: dict[str, str | None] = {}
    resumed_from: Any = None


class LeaseRecord(msgspec.Struct, tag="lease", tag_field="kind", frozen=True):
    rank: int
    generation: int
    batches: tuple[BatchRange, ...]


class RecallRecord(msgspec.Struct, tag="recall", tag_field="kind", frozen=True):
    """The rank gave up its leases from this batch on, in the order granted."""

    rank: int
    generation: int
    epoch: int
    index: int


class SealRecord(msgspec.Struct, tag="seal", tag_field="kind", frozen=True):
    rank: int
    generation: int
    round: int
    step: int
    batches: int
    samples: int


class AdoptRecord(msgspec.Struct, tag="adopt", tag_field="kind", frozen=True):
    rank: int
    generation: int
    round: int
    step: int


class CohortRecord(msgspec.Struct, frozen=True):
    rank: int
    generation: int
    batches: int
    samples: int
    weight: float


class AttemptRecord(msgspec.Struct, tag="attempt", tag_field="kind", frozen=True):
    round: int
    cohort: tuple[CohortRecord, ...]


class ExclusionRecord(msgspec.Struct, tag="exclusion", tag_field="kind", frozen=True):
    rank: int
    generation: int
    round: int
    quarantined: tuple[tuple[int, int], ...]
    first: str = ""


class CommitRecord(msgspec.Struct, tag="commit", tag_field="kind", frozen=True):
    round: int
    hash: int


class ExitRecord(msgspec.Struct, tag="exit", tag_field="kind", frozen=True):
    rank: int
    generation: int
    is_death: bool


class EvaluationRecord(msgspec.Struct, tag="evaluation", tag_field="kind", frozen=True):
    rank: int
    epoch: int
    round: int


class LostRecord(msgspec.Struct, tag="lost", tag_field="kind", frozen=True):
    """The disk was full for so long that lines of the schedule are missing here."""

    lines: int


PlayedRecord = (
    Head
    | LeaseRecord
    | RecallRecord
    | SealRecord
    | AdoptRecord
    | AttemptRecord
    | ExclusionRecord
    | CommitRecord
    | ExitRecord
    | EvaluationRecord
    | LostRecord
)
KINDS = frozenset(
    ["head", "lease", "recall", "seal", "adopt", "attempt", "exclusion", "commit", "exit", "evaluation", "lost"],
)
"""Of all records, those that a replay follows from."""


@dataclass(frozen=True)
class Seal:
    """At this step of its life the rank sealed its contribution. batches: trained since its previous seal.

    exclusion: it was found not finite, and left out.
    """

    round: int
    step: int
    samples: int
    batches: tuple[BatchRange, ...]
    exclusion: ExclusionRecord | None = None

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.batches)


@dataclass(frozen=True)
class Adopt:
    """At this step of its life the rank took θ of this round. is_excluded: overwriting, without its optimizer's state.

    evaluates: the epochs that it then evaluated.
    """

    round: int
    step: int
    is_excluded: bool = False
    evaluates: tuple[int, ...] = ()


Act = Seal | Adopt


@dataclass(frozen=True)
class Life:
    """What one process of a rank did, in order. batches: all that it trained before its last act, in order.

    is_killed: it died after that. What it had begun by then is in no act, and is not played.
    """

    rank: int
    generation: int
    acts: tuple[Act, ...]
    batches: tuple[BatchRange, ...]
    is_killed: bool

    @property
    def holder(self) -> Holder:
        return (self.rank, self.generation)


@dataclass(frozen=True)
class PlayedRound:
    """A committed round. before: how many acts of each life had been done when the sum began. hash: of the result."""

    number: int
    cohort: tuple[Contribution, ...]
    before: dict[Holder, int]
    hash: int
    contributed: tuple[BatchRange, ...]


@dataclass(frozen=True)
class Script:
    """The whole run up to its last commit. lives: those of each rank that had an act, in order."""

    head: Head
    lives: dict[int, tuple[Life, ...]]
    rounds: tuple[PlayedRound, ...]


def read_script(records: Iterable[dict[str, Any]]) -> Script:
    """From all records of a schedule, in order; one that ends anywhere is used up to its last commit.

    Raises ValueError, naming the record by its number from 1, where they are not those of one run of several ranks.
    """
    reader = _Reader()
    for number, record in enumerate(records, start=1):
        kind = record.get("kind")
        if kind not in KINDS:
            continue
        try:
            reader.read(msgspec.convert(record, PlayedRecord))
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"record {number} ({kind}): {error}") from error
    return reader.script()


def take(queue: deque[BatchRange], count: int) -> tuple[BatchRange, ...]:
    """Removes and returns the first `count` batches; fewer if there are fewer."""
    taken = []
    while count > 0 and queue:
        piece = queue.popleft()
        if piece.count > count:
            queue.appendleft(BatchRange(piece.epoch, piece.first + count, piece.count - count))
            piece = BatchRange(piece.epoch, piece.first, count)
        taken.append(piece)
        count -= piece.count
    return tuple(taken)


@dataclass
class _Draft:
    """A life as far as it was read."""

    rank: int
    generation: int
    acts: list[Act] = field(default_factory=list)
    queue: deque[BatchRange] = field(default_factory=deque)  # leased, and trained before no act so far
    batches: list[BatchRange] = field(default_factory=list)
    since_seal: list[BatchRange] = field(default_factory=list)
    step: int = 0
    is_excluded: bool = False  # since its last adoption
    is_killed: bool = False

    def train_to(self, step: int) -> None:
        taken = take(self.queue, step - self.step)
        if sum(piece.count for piece in taken) != step - self.step:
            raise ValueError(f"rank {self.rank} came from step {self.step} to {step} with other batches than it held")
        self.batches += taken
        self.since_seal += taken
        self.step = step

    def recall(self, epoch: int, index: int) -> None:
        kept: deque[BatchRange] = deque()
        for piece in self.queue:
            if piece.epoch == epoch and piece.first <= index < piece.first + piece.count:
                kept.append(BatchRange(epoch, piece.first, index - piece.first))
                self.queue = deque(piece for piece in kept if piece.count)
                return
            kept.append(piece)

    def life(self, rounds: int) -> Life:
        """Without what belongs to a round that was never committed, and all after that."""
        acts = tuple(takewhile(lambda act: isinstance(act, Adopt) or act.round < rounds, self.acts))
        trained = take(deque(self.batches), acts[-1].step if acts else 0)
        return Life(self.rank, self.generation, acts, trained, self.is_killed)


class _Reader:
    """Follows the records in their order."""

    def __init__(self) -> None:
        self._head: Head | None = None
        self._drafts: dict[Holder, _Draft] = {}
        self._rounds: list[PlayedRound] = []
        self._attempt: PlayedRound | None = None

    def read(self, record: PlayedRecord) -> None:
        if self._head is None and not isinstance(record, Head):
            raise ValueError("comes before the head")
        match record:
            case Head():
                if self._head is not None:
                    raise ValueError("a second head: two runs wrote here")
                if record.resumed_from is not None:
                    raise ValueError(f"the run went on from {record.resumed_from}, and only a whole run can be played")
                self._head = record
            case LeaseRecord(rank, generation, batches):
                self._draft(rank, generation).queue.extend(batches)
            case RecallRecord(rank, generation, epoch, index):
                self._draft(rank, generation).recall(epoch, index)
            case SealRecord():
                self._seal(record)
            case AdoptRecord():
                self._adopt(record)
            case AttemptRecord():
                self._begin_attempt(record)
            case ExclusionRecord():
                self._exclude(record)
            case CommitRecord():
                self._commit(record)
            case ExitRecord(rank, generation, is_death):
                self._draft(rank, generation).is_killed = is_death
            case EvaluationRecord():
                self._evaluate(record)
            case LostRecord(lines):
                raise ValueError(f"{lines} lines were lost here, because the disk was full")

    def script(self) -> Script:
        if self._head is None:
            raise ValueError("there is no head")
        if not self._rounds:
            raise ValueError("no round was committed")
        lives: dict[int, tuple[Life, ...]] = {}
        for holder, draft in sorted(self._drafts.items()):
            life = draft.life(len(self._rounds))
            is_late = holder not in self._rounds[-1].before
            if life.acts and not (is_late and not any(isinstance(a, Adopt) and a.evaluates for a in life.acts)):
                lives[draft.rank] = (*lives.get(draft.rank, ()), life)
        return Script(self._head, lives, tuple(self._rounds))

    def _draft(self, rank: int, generation: int) -> _Draft:
        return self._drafts.setdefault((rank, generation), _Draft(rank, generation))

    def _seal(self, record: SealRecord) -> None:
        draft = self._draft(record.rank, record.generation)
        if record.round != len(self._rounds) or (record.round == 0) != (not draft.acts):
            raise ValueError(f"rank {record.rank} sealed round {record.round} out of turn")
        draft.train_to(record.step)
        seal = Seal(record.round, record.step, record.samples, tuple(draft.since_seal))
        if seal.count != record.batches:
            raise ValueError(f"rank {record.rank} sealed {record.batches} batches and trained {seal.count}")
        draft.since_seal.clear()
        draft.acts.append(seal)

    def _adopt(self, record: AdoptRecord) -> None:
        draft = self._draft(record.rank, record.generation)
        lowest = len(self._rounds) - (2 if self._attempt is None else 1)
        if not lowest <= record.round < len(self._rounds):
            raise ValueError(f"rank {record.rank} adopted round {record.round}, which did not stand")
        draft.train_to(record.step)
        draft.acts.append(Adopt(record.round, record.step, draft.is_excluded))
        draft.is_excluded = False

    def _begin_attempt(self, record: AttemptRecord) -> None:
        if record.round != len(self._rounds) or not record.cohort:
            raise ValueError(f"round {record.round} was summed out of turn, or without a cohort")
        seals = [self._last_seal(c.rank, c.generation, record.round) for c in record.cohort]
        for member, seal in zip(record.cohort, seals, strict=True):
            if (member.batches, member.samples) != (seal.count, seal.samples):
                raise ValueError(f"rank {member.rank} counts with other batches than it sealed")
        samples = sum(member.samples for member in record.cohort)
        is_alone = len(record.cohort) == 1
        cohort = tuple(
            Contribution(c.rank, c.generation, c.batches, c.samples, c.weight, 1.0 if is_alone else c.samples / samples)
            for c in record.cohort
        )
        contributed = sorted((piece for seal in seals for piece in seal.batches), key=lambda b: (b.epoch, b.first))
        before = {holder: len(draft.acts) for holder, draft in self._drafts.items() if draft.acts}
        self._attempt = PlayedRound(record.round, cohort, before, 0, tuple(contributed))

    def _commit(self, record: CommitRecord) -> None:
        if self._attempt is None or record.round != self._attempt.number:
            raise ValueError(f"round {record.round} was committed without having been summed")
        self._rounds.append(dataclasses.replace(self._attempt, hash=record.hash))
        self._attempt = None

    def _exclude(self, record: ExclusionRecord) -> None:
        seal = self._last_seal(record.rank, record.generation, record.round)
        draft = self._draft(record.rank, record.generation)
        draft.acts[-1] = dataclasses.replace(seal, exclusion=record)
        draft.is_excluded = True

    def _evaluate(self, record: EvaluationRecord) -> None:
        """It follows its rank's adoption of that round; other ranks' acts may lie between."""
        draft = max((d for d in self._drafts.values() if d.rank == record.rank), key=lambda d: d.generation)
        for at in reversed(range(len(draft.acts))):
            act = draft.acts[at]
            if isinstance(act, Adopt) and act.round == record.round:
                draft.acts[at] = dataclasses.replace(act, evaluates=(*act.evaluates, record.epoch))
                return

    def _last_seal(self, rank: int, generation: int, round_: int) -> Seal:
        draft = self._drafts.get((rank, generation))
        act = draft.acts[-1] if draft is not None and draft.acts else None
        if not isinstance(act, Seal) or act.round != round_:
            raise ValueError(f"rank {rank} had not sealed round {round_}")
        return act
