"""Five bugs that others have paid for, planted one at a time: the soak must find each, or it proves nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from flodl.protocol.controller import Controller
from flodl.protocol.effects import Effect, RankExited, ReleaseMemory
from flodl.protocol.ledger import Contributed, Holder, Ledger
from flodl.protocol.membership import Loss, Phase, RankState, Roster
from flodl.protocol.messages import Window
from flodl.protocol.windows import Share, Windows
from flodl.simulation.soak import survey

SEEDS = range(300)
Patch = pytest.MonkeyPatch


def stale_plan_pin(patch: Patch) -> None:
    """A rank's target is kept from an earlier window, whatever has died or changed since."""
    plain = Windows._equip_one

    def pinned(self: Any, state: RankState, target: int | None, wanted: dict[int, int | None]) -> Share:
        pins = self.__dict__.setdefault("pins", {})
        share = plain(self, state, target, wanted)
        if share.window is None or share.window.batches is None:
            return share
        batches = pins.setdefault(state.rank, share.window.batches)
        state.window = Window(share.window.round, batches, share.window.run_ahead)
        return Share(state.window, share.grant)

    patch.setattr(Windows, "_equip_one", pinned)


def lost_lease(patch: Patch) -> None:
    """What a dead rank held is struck off, and goes back to nobody."""

    def forfeit(self: Ledger, holder: Holder) -> int:
        return sum(stop - start for _, start, stop in self._leased.pop(holder, ()))

    patch.setattr(Ledger, "forfeit", forfeit)


def double_commit(patch: Patch) -> None:
    """A commit leaves the sealed batches where they are, so that the next one settles them again."""
    plain = Ledger.commit

    def commit(self: Ledger, cohort: Iterable[Holder]) -> Contributed:
        holders = list(cohort)
        kept = {holder: list(self._sealed[holder]) for holder in holders if holder in self._sealed}
        settled = plain(self, holders)
        self._sealed.update(kept)
        return settled

    patch.setattr(Ledger, "commit", commit)


def torn_cohort(patch: Patch) -> None:
    """A dead rank's memory is given back while the round that counts it is still summed."""
    plain = Controller._exited

    def exited(self: Controller, event: RankExited, now: float) -> list[Effect]:
        return [*plain(self, event, now), ReleaseMemory(event.rank, event.generation)]

    patch.setattr(Controller, "_exited", exited)


def clean_exit_latch(patch: Patch) -> None:
    """A rank that ends with an error is taken for one that has left: nobody restarts it."""
    plain = Roster.lose

    def lose(self: Roster, state: RankState, event: RankExited, *rest: Any) -> Loss:
        if state.phase is Phase.ACTIVE:
            state.phase = Phase.GONE
            state.window = state.told = None
            return Loss(False, f"rank {state.rank} left as told")
        return plain(self, state, event, *rest)

    patch.setattr(Roster, "lose", lose)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (stale_plan_pin, ("stand idle", "has waited", "was never", "failed for no reason", "deadlock")),
        (lost_lease, ("stand idle", "never contributed", "has waited", "which is free", "deadlock")),
        (double_commit, ("contributed twice", "overlaps", "settles other batches")),
        (torn_cohort, ("which was released", "released while it is summed", "changed while")),
        (clean_exit_latch, ("counts as no death",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.timeout(300)
def test_the_soak_finds_a_planted_bug(
    plant: Callable[[Patch], None], words: tuple[str, ...], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = next((found for found in map(survey, SEEDS) if found.problem), None)
    assert found is not None, f"{plant.__name__} survived {len(SEEDS)} seeds"
    assert any(word in found.problem for word in words), found.problem
    monkeypatch.undo()
    assert survey(found.seed).problem == ""
