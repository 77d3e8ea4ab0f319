"""An independent account of a simulated run: what was leased, summed and settled, and what must hold at each event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.effects import CommitRound, EndRun, Record, Reduce
from flodl.protocol.ledger import MAX_RETURNS
from flodl.protocol.settings import Beginning
from flodl.simulation.rank import Memory
from flodl.simulation.scenario import Batch, Holder, Scenario

Complain = Callable[[str], Exception]


@dataclass
class Witness:
    """`complain` makes the exception for a violation. Batches are (epoch, index)."""

    scenario: Scenario
    complain: Complain
    contributed: set[Batch] = field(default_factory=set)
    earlier: set[Batch] = field(default_factory=set)  # contributed by the run that this one goes on from
    quarantined: set[Batch] = field(default_factory=set)
    exclusions: dict[Batch, int] = field(default_factory=dict)
    returns: dict[Batch, int] = field(default_factory=dict)
    memories: dict[Holder, Memory] = field(default_factory=dict)
    dismissed: set[Holder] = field(default_factory=set)
    wanted: set[Batch] = field(default_factory=set)
    _leased: dict[Batch, Holder] = field(default_factory=dict)
    _sealed: dict[Holder, list[Batch]] = field(default_factory=dict)
    _free: set[Batch] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.wanted = self._all_wanted()
        self._free = set(self.wanted)
        self._epoch_sizes = [sum(epoch == e for epoch, _ in self._free) for e in sorted({e for e, _ in self._free})]
        self._settled = [0] * len(self._epoch_sizes)
        self._closed = 0
        if self.scenario.settings.beginning is not None:
            self._go_on(self.scenario.settings.beginning)

    def _go_on(self, beginning: Beginning) -> None:
        """What an earlier run has settled is not to be leased again."""
        self.earlier = {(b.epoch, i) for b in beginning.contributed for i in range(b.first, b.first + b.count)}
        self.quarantined = set(beginning.quarantined)
        for batch in self.earlier | self.quarantined:
            self._free.remove(batch)
            self._settle(batch)
        self._closed = self.epoch

    def _all_wanted(self) -> set[Batch]:
        """Every batch that the run is to contribute."""
        settings = self.scenario.settings
        most = settings.dataset_length * settings.epochs if settings.samples is None else settings.samples
        found, samples = set(), 0
        for epoch in range(settings.epochs):
            for index in range(settings.batches_per_epoch):
                if samples < most:
                    found.add((epoch, index))
                    samples += settings.samples_of(index)
        return found

    @property
    def epoch(self) -> int:
        """The lowest that is not settled."""
        at = 0
        while at < len(self._settled) and self._settled[at] == self._epoch_sizes[at]:
            at += 1
        return at

    # ---- leases

    def record(self, record: Record) -> None:
        fields = record.fields
        if record.kind == "lease":
            holder = (fields["rank"], fields["generation"])
            self._lease(holder, [(e, i) for e, first, count in fields["batches"] for i in range(first, first + count)])
        elif record.kind == "seal":
            holder = (fields["rank"], fields["generation"])
            self._sealed[holder] = list(self.memories[holder].batches)
        elif record.kind == "exit":
            self._exit((fields["rank"], fields["generation"]), fields["returned"])
            self._check_death((fields["rank"], fields["generation"]), fields["is_death"])
        elif record.kind == "abort":
            self._check_closed(fields["round"], fields["closed_epochs"])
        elif record.kind == "exclusion":
            self._exclude((fields["rank"], fields["generation"]), set(fields["suspects"]), fields["quarantined"])

    def _lease(self, holder: Holder, batches: list[Batch]) -> None:
        for batch in batches:
            if batch not in self._free:
                owner = self._leased.get(batch, "nobody: it is settled")
                raise self.complain(f"batch {batch} is leased to {holder} and is already with {owner}")
            if batch[0] > self.epoch + 1:
                raise self.complain(f"batch {batch} is leased while epoch {self.epoch} is open: over one epoch ahead")
            self._free.remove(batch)
            self._leased[batch] = holder
        fresh = [batch for batch in batches if batch not in self.exclusions]
        passed = [b for b in self._free if b not in self.exclusions and fresh and b < max(fresh)]
        if passed:
            raise self.complain(f"batch {max(fresh)} is leased before {min(passed)}, which is free")

    def recalled(self, holder: Holder, first: Batch) -> None:
        """The holder gives up what it has from this batch on, in the order granted."""
        held = [batch for batch, owner in self._leased.items() if owner == holder]
        if first not in held:
            raise self.complain(f"{holder} gives up {first}, which it does not hold")
        for batch in held[held.index(first) :]:
            del self._leased[batch]
            self._free.add(batch)

    def _exit(self, holder: Holder, returned: int) -> None:
        sealed = set(self._sealed.get(holder, ()))
        back = [b for b, owner in self._leased.items() if owner == holder and b not in sealed]
        if len(back) != returned:
            raise self.complain(
                f"{holder} died with {len(back)} leases not sealed, and {returned} went back to the pool"
            )
        for batch in back:
            del self._leased[batch]
            self._free.add(batch)

    def _check_death(self, holder: Holder, is_death: bool) -> None:
        if not is_death and holder not in self.dismissed:
            raise self.complain(f"{holder} ended, nobody had told it to, and it counts as no death")

    def _exclude(self, holder: Holder, suspects: set[Batch], quarantined: list[Batch]) -> None:
        for batch in self._sealed.pop(holder):
            del self._leased[batch]
            if suspects and batch not in suspects and self.returns.get(batch, 0) < MAX_RETURNS:
                self.returns[batch] = self.returns.get(batch, 0) + 1
                self._free.add(batch)
                if batch in quarantined:
                    raise self.complain(f"batch {batch} is given up, and only {sorted(suspects)} are suspected")
                continue
            times = self.exclusions[batch] = self.exclusions.get(batch, 0) + 1
            if (times == 2) != (batch in quarantined):
                raise self.complain(f"batch {batch} was excluded {times} times; quarantined now: {quarantined[:5]}")
            if times == 1:
                self._free.add(batch)
            else:
                self.quarantined.add(batch)
                self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        self._settled[batch[0]] += 1

    # ---- rounds

    def check_cohort(self, reduce: Reduce) -> None:
        """Weights sum to 1; every memory that is read holds what was announced, on the committed state."""
        if not reduce.contributions:
            raise self.complain(f"round {reduce.round} is reduced without a contribution")
        for weights in ([c.weight for c in reduce.contributions], [c.buffer_weight for c in reduce.contributions]):
            if abs(sum(weights) - 1.0) > 1e-9:
                raise self.complain(f"round {reduce.round}: weights {weights} do not sum to 1")
        for c in reduce.contributions:
            memory = self.memories.get((c.rank, c.generation))
            if memory is None:
                raise self.complain(
                    f"round {reduce.round} reads the memory of {(c.rank, c.generation)}, which was released"
                )
            if memory.sealed_round != reduce.round:
                what = f"its memory was last sealed for round {memory.sealed_round}"
                raise self.complain(f"torn cohort: rank {c.rank} counts in round {reduce.round}, and {what}")
            if reduce.round > 0 and (len(memory.batches) != c.batches or memory.based_on != reduce.round - 1):
                raise self.complain(
                    f"torn cohort: rank {c.rank} counts {c.batches} batches on round {reduce.round - 1}; "
                    f"its memory holds {len(memory.batches)} on round {memory.based_on}"
                )

    def commit(self, effect: CommitRound, reduce: Reduce) -> None:
        """What the ledger settles is exactly what the summed memories hold, and was never contributed before."""
        summed: list[Batch] = []
        for c in reduce.contributions:
            memory = self.memories[c.rank, c.generation]
            self._sealed.pop((c.rank, c.generation), None)
            if memory.poisoned:
                raise self.complain(
                    f"round {effect.round} commits the contribution of rank {c.rank}, which is not finite"
                )
            summed += memory.batches
        settled = [(b.epoch, index) for b in effect.contributed for index in range(b.first, b.first + b.count)]
        twice = (self.earlier | self.contributed).intersection(settled)
        if twice or len(set(settled)) != len(settled):
            raise self.complain(f"batches contributed twice: {sorted(twice)[:5]}")
        if not effect.is_seed and sorted(settled) != sorted(summed):
            raise self.complain(f"round {effect.round} settles other batches than it sums")
        for batch in settled:
            self._leased.pop(batch, None)
            self._settle(batch)
        self.contributed.update(settled)
        self._check_closed(effect.round, effect.state["closed_epochs"])

    def _check_closed(self, round_: int, told: list[int]) -> None:
        closed, self._closed = list(range(self._closed, self.epoch)), self.epoch
        if told != closed:
            raise self.complain(f"round {round_} closes epochs {told} instead of {closed}")

    # ---- the end

    def check_end(self, end: EndRun, summary: dict[str, Any]) -> None:
        if not end.failed:
            missing = self.wanted - self.earlier - self.contributed - self.quarantined
            if missing:
                raise self.complain(
                    f"the run is done and {len(missing)} batches were never contributed: {sorted(missing)[:5]}"
                )
        if self.contributed & self.quarantined or {tuple(b) for b in summary["quarantined"]} != self.quarantined:
            raise self.complain(f"quarantined: {summary['quarantined']} in the summary, {self.quarantined} in truth")
        samples = sum(self.scenario.settings.samples_of(index) for _, index in self.contributed)
        if summary["samples"] != samples or summary["batches"] != len(self.contributed):
            raise self.complain(f"the summary counts {summary['samples']} samples; {samples} were contributed")
        shares = sum(rank["share"] for rank in summary["ranks"])
        if self.contributed and abs(shares - 1.0) > 1e-9:
            raise self.complain(f"the shares sum to {shares}")
        for epoch in summary["epochs"]:
            held = [index for number, index in self.earlier | self.contributed if number == epoch["epoch"]]
            counted = sum(self.scenario.settings.samples_of(index) for index in held)
            if epoch["samples"] != counted:
                raise self.complain(
                    f"epoch {epoch['epoch']} counts the loss of {epoch['samples']} of {counted} samples"
                )
        self._check_failure(end, summary)

    def _check_failure(self, end: EndRun, summary: dict[str, Any]) -> None:
        """A run fails only for a reason that the scenario holds."""
        if not end.failed:
            return
        scenario, settings = self.scenario, self.scenario.settings
        kinds = {fault.kind for fault in scenario.faults}
        most = settings.max_failures
        limit = most if most is None or isinstance(most, int) else most * settings.world_size
        is_exhausted = all(r["deaths"] > settings.respawn for r in summary["ranks"])
        reasons = {
            "over max_failures": limit is not None and summary["deaths"] > limit,
            "no rank is left": is_exhausted,
            "no rank was admitted": bool(scenario.plans) or is_exhausted,
            "a rank failed before": bool(kinds & {"raise", "quit", "start_failure"} or scenario.failing_batches),
            "failed twice": bool(scenario.failing_batches or "raise" in kinds),
            "not finite": bool(scenario.nan_batches),
            "interrupted": "interrupt" in kinds,
            "the checkpoint does not fit": settings.beginning is not None,
        }
        if not any(words in end.reason and is_so for words, is_so in reasons.items()):
            raise self.complain(f"the run failed for no reason that the scenario holds: {end.reason}")
