"""Ranks and a host in one process that play a Replay: the rank's real loop over a plane and work of no content."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flodl.protocol.effects import (
    Admit,
    CommitRound,
    Committed,
    Effect,
    EndRun,
    KillRank,
    RankExited,
    Record,
    Reduce,
    Reduced,
    ReleaseMemory,
    Send,
    StartRank,
)
from flodl.protocol.messages import Commit, DataSpec, FromRank, Hello, ToRank
from flodl.protocol.replay import Replay
from flodl.protocol.script import Script
from flodl.protocol.settings import ControllerSettings
from flodl.rank.leases import Lease, Leases
from flodl.rank.loop import RankLoop
from flodl.rank.tally import Trained
from flodl.records.record import decode_line, encode_line
from flodl.simulation.rank import LAYOUT

Records = list[dict[str, Any]]
HEAD = {"kind": "head", "run": "first", "plan": {}, "dataset_length": 1, "threads": {"rank": 1, "averaging": 1}}


class Idle(Exception):
    """The rank has heard everything and waits."""


class Rank:
    """The real loop over a plane and work of no content. `diary`: what it did, for the end of the test to compare."""

    def __init__(self, cluster: Cluster, effect: Admit | StartRank) -> None:
        self.cluster = cluster
        self.holder = (effect.rank, effect.generation)
        self.inbox: deque[ToRank] = deque()
        self.outbox: deque[FromRank] = deque()
        self.is_over = False
        self.is_waiting = True
        self.overwritten: list[int] = []
        self.forgotten = 0
        self.commit: Commit | None = None
        self.trained: list[Lease] = []
        self.evaluated: list[int] = []
        self.keeps_steps = cluster.settings.mode == "cpu-async"
        self.loop = RankLoop(self, self, self, clock=lambda: 0.0)
        hello = Hello(1, "sim", cluster.settings.plan, LAYOUT, DataSpec(1, "sim"), cluster.threads)
        self.outbox.append(hello)

    def run(self) -> None:
        """Until it waits for something, is overtaken, or leaves."""
        self.is_waiting = False
        try:
            self.loop.run()
            self.is_over = True
        except Idle:
            pass

    def receive(self, wait: bool) -> list[ToRank]:
        """Between any two batches the others may come first."""
        if not self.inbox and (wait or self.cluster.draw.random() < 0.3):
            self.is_waiting = wait
            raise Idle
        heard = [self.inbox.popleft()] if self.inbox else []
        self.commit = next((m for m in heard if isinstance(m, Commit)), self.commit)
        return heard

    def send(self, message: FromRank) -> None:
        self.outbox.append(message)

    def seal(self) -> None: ...

    def adopt(self, buffer: int, overwrite: bool) -> int:
        assert self.commit is not None
        assert self.cluster.theta[buffer] == self.commit.round, "it reads a buffer that was written since"
        self.overwritten += [self.commit.round] if overwrite else []
        return self.commit.hash

    @contextmanager
    def showing(self, buffer: int) -> Iterator[None]:
        yield

    def follow(self, upcoming: Leases) -> None: ...

    def train(self, lease: Lease, upcoming: Leases) -> Trained:
        self.trained.append(lease)
        return Trained(1.0, self.cluster.settings.samples_of(lease.index), 1.0, 0.0)

    def forget(self) -> None:
        self.forgotten += 1

    def evaluate(self, epoch: int) -> dict[str, float]:
        self.evaluated.append(epoch)
        return {"accuracy": 0.5}


class Cluster:
    """Drives a Replay over ranks and a host in one process; what happens next is drawn."""

    def __init__(self, settings: ControllerSettings, script: Script, seed: int = 0, threads: int = 1) -> None:
        self.settings = settings
        self.threads = threads
        self.replay = Replay(settings, script, ["a note"])
        self.draw = random.Random(seed)
        self.ranks: dict[int, Rank] = {}
        self.lives: dict[tuple[int, int], Rank] = {}
        self.memories: set[tuple[int, int]] = set()
        self.theta: list[int | None] = [None, None]
        self.buffer = 0
        self.work: list[Reduce | CommitRound] = []
        self.exits: list[RankExited] = []
        self.records: Records = [dict(HEAD)]
        self.end: EndRun | None = None
        self.hashes: dict[int, int] = {}

    def play(self) -> EndRun:
        self.perform(self.replay.start(0.0))
        for _ in range(1_000_000):
            if self.end is not None:
                return self.end
            chances = self.chances()
            assert chances, f"nothing happens any more after {self.records[-5:]}"
            self.happen(self.draw.choice(chances))
        raise AssertionError("the replay does not end")

    def chances(self) -> list[Rank | Reduce | CommitRound | RankExited]:
        """What may happen next."""
        ready = [r for r in self.ranks.values() if r.inbox or r.outbox or not (r.is_waiting or r.is_over)]
        return [*ready, *self.work[:1], *self.exits]

    def happen(self, chance: Rank | Reduce | CommitRound | RankExited) -> None:
        match chance:
            case Rank():
                if chance.outbox:
                    self.perform(self.replay.receive(*chance.holder, chance.outbox.popleft(), 0.0))
                else:
                    chance.run()
                if chance.is_over and not chance.outbox:
                    self.exits.append(RankExited(*chance.holder, 0))
                    del self.ranks[chance.holder[0]]
            case Reduce(round_, attempt, cohort):
                self.work.pop(0)
                finite, distance = (True,) * len(cohort), (0.1,) * len(cohort)
                self.perform(self.replay.tell(Reduced(attempt, finite, distance, 1.0, 1, 0.0), 0.0))
            case CommitRound(round_):
                self.work.pop(0)
                self.buffer = 1 - self.buffer
                self.theta[self.buffer] = round_
                hash_ = self.hashes.get(round_, 1000 + round_)
                self.perform(self.replay.tell(Committed(round_, self.buffer, hash_, 0.0), 0.0))
            case RankExited():
                self.exits.remove(chance)
                self.perform(self.replay.tell(chance, 0.0))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    assert rank in self.ranks, f"{message} is sent to nobody"
                    self.ranks[rank].inbox.append(message)
                case StartRank(rank, generation):
                    assert rank not in self.ranks
                    self.ranks[rank] = self.lives[rank, generation] = Rank(self, effect)
                case KillRank(rank, generation):
                    if rank in self.ranks:
                        del self.ranks[rank]
                        self.exits.append(RankExited(rank, generation, -9))
                case Admit(rank, generation):
                    self.memories.add((rank, generation))
                case ReleaseMemory(rank, generation):
                    self.memories.discard((rank, generation))
                case Reduce(contributions=cohort):
                    assert {(c.rank, c.generation) for c in cohort} <= self.memories
                    self.theta[1 - self.buffer] = None
                    self.work.append(effect)
                case CommitRound():
                    self.work.append(effect)
                case Record(kind, fields):
                    self.records.append(decode_line(encode_line({"kind": kind, **fields})))
                case EndRun():
                    self.end = effect
