"""What ranks are told at a commit: the state that stands, windows, leases, and what to do beside training."""

from __future__ import annotations

from dataclasses import replace

from flodl.protocol.effects import Effect, Record, Send
from flodl.protocol.membership import Phase, RankState, Roster
from flodl.protocol.messages import Commit
from flodl.protocol.round import Round
from flodl.protocol.rounds import Rounds
from flodl.protocol.saves import NO_ORDER
from flodl.protocol.windows import Duties, Share, Windows, lease_record


class Commits:
    """Makes the Commit messages of the round that stands."""

    def __init__(self, roster: Roster, rounds: Rounds, windows: Windows, duties: Duties) -> None:
        self._roster = roster
        self._rounds = rounds
        self._windows = windows
        self._evaluations = duties.evaluations
        self._saves = duties.saves

    def open_window(self, finished: Round, now: float) -> list[Effect]:
        """A Commit for everyone present, each with its window and leases."""
        members = self._roster.present()
        evaluations = self._evaluations.assign(members)
        orders = self._saves.begin(finished.number, members)
        if orders:
            self._rounds.leave_untimed()
        number = self._rounds.current.number
        shares, why = self._windows.deal(number, now)
        effects: list[Effect] = [Record("window", {"round": number, "reason": why})] if why else []
        for state in members:
            share = replace(shares.get(state.rank, Share()), save=orders.get(state.rank, NO_ORDER))
            is_excluded = state.holder in finished.excluded
            effects.append(self.tell(state, share, evaluations.get(state.rank, ()), now, is_excluded))
            effects += lease_record(state, share.grant)
        return effects + self._saves.velocity()

    def save_last(self, now: float) -> list[Effect]:
        """What fell due while another checkpoint was in the making, or at a round that was aborted."""
        assert self._rounds.committed is not None
        orders = self._saves.begin(self._rounds.committed.round, self._roster.present())
        told = [self.tell(self._roster[rank], Share(save=order), (), now) for rank, order in orders.items()]
        return [*told, *self._saves.velocity(), *self._saves.advance(self._evaluations.await_any)]

    def tell(
        self, state: RankState, share: Share, evaluate: tuple[int, ...], now: float, is_excluded: bool = False
    ) -> Send:
        """The state that stands, to one rank."""
        committed = self._rounds.committed
        assert committed is not None
        state.expect(now)
        if state.told is None:
            state.told = committed.round
        if state.phase is Phase.ADMITTED:
            state.phase = Phase.ADOPTING
        commit = Commit(
            committed.round,
            committed.buffer,
            committed.hash,
            window=share.window,
            grant=share.grant,
            excluded=is_excluded,
            evaluate=evaluate,
            save=share.save.directory,
            saves_consensus=share.save.saves_consensus,
        )
        return Send(state.rank, commit)
