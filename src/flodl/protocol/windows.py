"""Windows and the leases that fill them: planned at a commit, topped up, cut short, given to ranks that stand idle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from flodl.protocol.cadence import PROBE_BATCHES, Cadence
from flodl.protocol.effects import Effect, Record, Send
from flodl.protocol.evaluations import Evaluations
from flodl.protocol.ledger import Holder, Ledger
from flodl.protocol.membership import Phase, RankState, Roster
from flodl.protocol.messages import BatchRange, Continue, Grant, Recall, SealNow, Window
from flodl.protocol.planning import Horizon, Member, one_each, targets
from flodl.protocol.round import Round
from flodl.protocol.saves import NO_ORDER, Order, Saves
from flodl.protocol.settings import ControllerSettings

NEXT_LOOK_S = 0.1
"""A rank that has not yet adopted would not know the window that it is asked to end."""

LEAST_PATIENCE_S = 0.02
"""A window is not cut for less than this: message delays and jitter are no stragglers."""


@dataclass(frozen=True)
class Share:
    """What one rank gets at a commit. window None: nothing to do until told otherwise."""

    window: Window | None = None
    grant: tuple[BatchRange, ...] = ()
    save: Order = NO_ORDER


@dataclass(frozen=True)
class Duties:
    """What ranks do beside training."""

    evaluations: Evaluations
    saves: Saves


class Windows:
    """Deals work. A rank's window never asks for more batches than the rank holds, so that every window can end."""

    def __init__(
        self,
        settings: ControllerSettings,
        ledger: Ledger,
        roster: Roster,
        cadence: Cadence,
        duties: Duties,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._roster = roster
        self._cadence = cadence
        self._evaluations = duties.evaluations
        self._saves = duties.saves
        self._round = 0
        self._ends_at = 0.0  # when the longest window should be over, by the measured speeds; inf: open
        self._cut_at: float | None = None
        self._told_to_seal: set[Holder] = set()
        self._was_cut: set[Holder] = set()
        self._ends_first: Holder | None = None
        self._is_hurried = False

    @property
    def _is_sync(self) -> bool:
        return self._settings.mode.endswith("-sync")

    @property
    def _is_async(self) -> bool:
        return self._settings.mode.endswith("-async")

    # ---- at a commit

    def deal(self, round_: int, now: float) -> tuple[dict[int, Share], str]:
        """The next window for everyone who has the state or is about to; a joiner that still copies comes in later."""
        self._round = round_
        self._cut_at, self._ends_first = None, None
        self._told_to_seal.clear()
        self._was_cut.clear()
        members = [s for s in self._roster.present() if s.phase is not Phase.ADOPTING and not s.is_recalling]
        wanted, why = self._plan(members, now)
        return self._announced(self._equip(members, wanted), opens=True), why

    def _plan(self, members: list[RankState], now: float) -> tuple[dict[int, int | None], str]:
        """Batches per rank: None is an open window, 0 nothing to do."""
        held = {s.rank: self._ledger.held(s.holder) for s in members}
        reachable = self._ledger.grantable() + sum(held.values())
        if not members or reachable == 0:
            return {}, ""
        if self._is_hurried and self._saves.is_under_way:
            return {}, "the run ends once its checkpoint is whole"
        pace = self._cadence.pace(held)
        if pace.counts is None and not self._is_sync and not self._is_hurried:
            self._ends_at = float("inf")
            return dict.fromkeys(held), pace.reason
        able = [Member(s.rank, self._cadence.ms(s.rank) or 1.0, held[s.rank], self._slack_ms(s)) for s in members]
        horizon = Horizon(reachable, self._ledger.unsettled())
        if self._is_sync or self._is_hurried or pace.counts is None:
            dealt, why = one_each(able, horizon), ""
        else:
            dealt, why = targets(able, pace.counts, horizon)
        self._ends_at = now + max(dealt[m.rank] * m.ms for m in able) / 1000.0
        return dict(dealt), why or pace.reason

    def _slack_ms(self, state: RankState) -> float:
        return state.evaluation_ms if self._evaluations.is_assigned_to(state.holder) else 0.0

    def _equip(self, members: list[RankState], wanted: dict[int, int | None]) -> dict[int, Share]:
        """Leases to fill each window and to keep the loader busy beyond it.

        A rank that must avoid what is left may get less than planned; then somebody without a window takes that.
        """
        shares = {s.rank: self._equip_one(s, wanted.get(s.rank, 0), wanted) for s in members}
        missing = sum(wanted.get(s.rank) or 0 for s in members if s.window is None)
        for state in members if missing else []:
            if state.window is None:
                grant = self._grant(state, min(missing, 1) if self._is_sync else missing)
                if grant:
                    state.window = Window(self._round, sum(b.count for b in grant))
                    shares[state.rank] = Share(state.window, grant)
                    missing -= sum(b.count for b in grant)
        return shares

    def _announced(self, shares: dict[int, Share], opens: bool) -> dict[int, Share]:
        """The same, told that the round may be saved where it may."""
        if not self._saves.announces(self._round, opens):
            return shares
        for rank, share in shares.items():
            if share.window is not None:
                window = self._roster[rank].window = msgspec.structs.replace(share.window, saves=True)
                shares[rank] = replace(share, window=window)
        return shares

    def _equip_one(self, state: RankState, target: int | None, wanted: dict[int, int | None]) -> Share:
        state.window = None
        if target == 0:
            return Share()
        ahead = self._run_ahead(state, target)
        held = self._ledger.held(state.holder)
        if target is None:
            more = 2 * (PROBE_BATCHES + self._settings.prefetch) - held
        else:
            planned = sum(t or 0 for t in wanted.values())
            is_near_end = self._ledger.unsettled() < 3 * planned + self._settings.prefetch * len(wanted)
            beyond = min(ahead if is_near_end else ahead + self._settings.prefetch, self._spare(wanted))
            more = target - held + beyond
        grant = self._grant(state, more) if more > 0 else ()
        held = self._ledger.held(state.holder)
        if held == 0:
            return Share()
        state.window = Window(self._round, None if target is None else min(target, held), ahead)
        return Share(state.window, grant)

    def _spare(self, wanted: dict[int, int | None]) -> int:
        """Grantable batches that no window of these ranks still lacks: what one reads ahead is no other's batch."""
        lacking = sum(max(0, (target or 0) - self._ledger.held(self._roster[r].holder)) for r, target in wanted.items())
        return max(0, self._ledger.grantable() - lacking)

    def _run_ahead(self, state: RankState, target: int | None) -> int:
        """async: batches that cover the rank's longest recent wait for a commit, and one more; one window at most."""
        ms = self._cadence.ms(state.rank)
        if not self._is_async or ms is None or target is None:
            return 0
        return min(target, int(max(state.waits_ms, default=self._cadence.round_ms) / ms) + 1)

    def _grant(self, state: RankState, count: int) -> tuple[BatchRange, ...]:
        return self._ledger.grant(state.holder, count, is_alone=len(self._roster.present()) == 1)

    # ---- while windows are open

    def top_up(self, state: RankState) -> list[Effect]:
        """An open window never runs dry; a closed one was granted whole."""
        if state.window is None or state.window.batches is not None or state.is_recalling:
            return []
        low = PROBE_BATCHES + self._settings.prefetch
        if self._ledger.held(state.holder) - state.trained >= low:
            return []
        granted = self._grant(state, 2 * low)
        return [Send(state.rank, Grant(granted)), *lease_record(state, granted)] if granted else []

    def end_open(self, now: float) -> list[Effect]:
        """Once every rank of an open window is measured it ends: the slowest at its next boundary, the others when that
        one has sealed, so that nobody waits for a slow batch. It ends early where there is nothing left to lease.
        """
        open_ranks = [s for s in self._roster.present() if s.window is not None and s.window.batches is None]
        if not open_ranks:
            return []
        if self._ends_first is None:
            if any(s.told is not None for s in open_ranks):
                return []
            is_starved = not self._ledger.grantable() and any(self._is_out_of_work(s) for s in open_ranks)
            if not is_starved and not all(self._is_measured(s) for s in open_ranks):
                return []
            slowest = min(open_ranks, key=lambda s: (s.trained, s.rank))
            self._ends_first = slowest.holder
            return self._end_now(slowest)
        if any(s.holder == self._ends_first and s.window is not None for s in self._roster.present()):
            return []
        self._ends_at = now
        return [effect for state in open_ranks for effect in self._seal_now(state)]

    def _end_now(self, state: RankState) -> list[Effect]:
        """Its window ends; where the pool cannot fill the others' next, it gives back what it has not started."""
        effects = self._seal_now(state)
        if self._ledger.held(state.holder) - state.trained > max(1, self._ledger.grantable()):
            state.is_recalling = True
            effects.append(Send(state.rank, Recall(0)))
        return effects

    def _is_measured(self, state: RankState) -> bool:
        return state.trained >= PROBE_BATCHES or self._is_out_of_work(state)

    def _is_out_of_work(self, state: RankState) -> bool:
        return self._ledger.held(state.holder) <= state.trained

    def _seal_now(self, state: RankState) -> list[Effect]:
        assert state.window is not None
        if state.window.batches is None:
            state.window = Window(self._round, state.trained)
        self._told_to_seal.add(state.holder)
        return [Send(state.rank, SealNow(self._round))]

    def feed_idle(self, round_: Round, now: float) -> list[Effect]:
        """A rank that stands at the committed state and has no window (a joiner, or one dealt nothing) gets work."""
        idle = [s for s in self._roster.present() if _is_idle(s, round_)]
        if not idle or not (self._ledger.grantable() or any(self._ledger.held(s.holder) for s in idle)):
            return []
        others_work = any(s.window is not None for s in self._roster.present()) or round_.has_work
        ends = self._ends_at
        wanted, why = self._plan(idle, now)
        if others_work:
            self._ends_at = max(ends, now)
            wanted = self._fit(wanted, ends - now)
        effects: list[Effect] = []
        for rank, share in self._announced(self._equip(idle, wanted), opens=False).items():
            state = self._roster[rank]
            if share.window is not None:
                round_.drop_empty(state.holder)
                self._forget_end(state.holder)
                state.expect(now)
                effects += [Send(rank, Continue(share.window, share.grant)), *lease_record(state, share.grant)]
        return [Record("window", {"round": self._round, "reason": why}), *effects] if effects else []

    def _forget_end(self, holder: Holder) -> None:
        """It got another window in the same round: that its first was ended says nothing of this one."""
        self._told_to_seal.discard(holder)
        self._was_cut.discard(holder)
        if self._ends_first == holder:
            self._ends_first = None

    def _fit(self, wanted: dict[int, int | None], left_s: float) -> dict[int, int | None]:
        """No more than fits into the window that the others are in, so that the joiner is not waited for."""
        fitted: dict[int, int | None] = {}
        for rank, target in wanted.items():
            ms = self._cadence.ms(rank)
            if target is not None and ms is not None and not self._is_sync and left_s < float("inf"):
                target = min(target, int(max(0.0, left_s) * 1000.0 / ms))
            fitted[rank] = target
        return fitted

    # ---- before the end

    def hurry(self, now: float) -> None:
        """From here on every window is one batch, and those under way end at their next step."""
        self._is_hurried = True
        if not self._is_sync:
            self._cut_at = now

    # ---- stragglers

    def sealed(self, now: float) -> None:
        """A rank waits from here on: the others' windows are cut when it has waited for one slow batch."""
        if self._cut_at is None and self._round > 0 and not self._is_sync:
            slowest = max((self._cadence.ms(s.rank) or 0.0 for s in self._roster.present()), default=0.0)
            self._cut_at = max(self._ends_at if self._ends_at < float("inf") else now, now) + max(
                slowest / 1000.0, LEAST_PATIENCE_S
            )

    def next_deadline(self) -> float | None:
        return self._cut_at

    def cut(self, now: float) -> list[Effect]:
        """Ends the windows of ranks that are late at their next boundary; what they did counts."""
        if self._cut_at is None or now < self._cut_at:
            return []
        self._cut_at = None
        late = [s for s in self._roster.present() if s.window is not None and s.holder not in self._told_to_seal]
        if any(s.told is not None for s in late):
            self._cut_at = now + NEXT_LOOK_S
            late = [s for s in late if s.told is None]
        effects: list[Effect] = []
        if self._is_hurried:
            return [effect for state in late for effect in self._seal_now(state)]
        for state in late:
            self._was_cut.add(state.holder)
            effects += self._end_now(state)
        if late:
            ranks = ", ".join(str(s.rank) for s in late)
            reason = f"the others wait for rank {ranks}: the window ends at its next step"
            effects.insert(0, Record("cut", {"round": self._round, "reason": reason}))
        return effects

    def was_cut(self, holder: Holder) -> bool:
        """Whether this rank was late in the round under way: what was known of its speed no longer holds."""
        return holder in self._was_cut

    def recalled(self, state: RankState, epoch: int | None, index: int | None) -> None:
        """The rank's answer to a Recall. Raises ValueError for one that was not asked for."""
        if not state.is_recalling:
            raise ValueError("gave up leases without being asked")
        state.is_recalling = False
        if epoch is not None and index is not None:
            self._ledger.recall(state.holder, epoch, index)


def _is_idle(state: RankState, round_: Round) -> bool:
    return (
        state.phase is Phase.ACTIVE
        and state.window is None
        and state.told is None
        and not state.is_recalling
        and state.adopted == round_.number - 1
        and not round_.counts(state.holder)
    )


def lease_record(state: RankState, granted: Iterable[BatchRange]) -> list[Effect]:
    """For the schedule."""
    batches = [[b.epoch, b.first, b.count] for b in granted]
    if not batches:
        return []
    return [Record("lease", {"rank": state.rank, "generation": state.generation, "batches": batches})]
