"""From counts and what is left to a window for each rank. Pure: the same question has the same answer."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A rank that can work in the next window. ms: per batch; held: leased already; slack_ms: a pause to expect."""

    rank: int
    ms: float
    held: int
    slack_ms: float = 0.0


@dataclass(frozen=True)
class Horizon:
    """Batches not yet contributed. reachable: leased to these members or grantable now; total: of the whole run."""

    reachable: int
    total: int


def targets(members: list[Member], counts: dict[int, int], horizon: Horizon) -> tuple[dict[int, int], str]:
    """Batches per rank for the next window, and why.

    Far from the end these are the counts. Where what is reachable makes less than one window and a half, all of it is
    dealt so that the last to finish finishes earliest: nobody then waits longer than about one slow batch.
    """
    slacked = {m.rank: max(min(1, counts[m.rank]), counts[m.rank] - round(m.slack_ms / m.ms)) for m in members}
    wanted = sum(slacked.values())
    grantable = horizon.reachable - sum(m.held for m in members)
    is_last = horizon.reachable == horizon.total
    if horizon.reachable < wanted or (is_last and horizon.reachable * 2 <= wanted * 3):
        why = "the last window" if is_last else "what is left of this epoch and the next"
        dealt = _dealt_out(members, {m.rank: horizon.reachable for m in members}, grantable)
        return dealt, f"{why}: {horizon.reachable} batches dealt to end together"
    return _dealt_out(members, slacked, grantable), ""


def one_each(members: list[Member], horizon: Horizon) -> dict[int, int]:
    """sync: every rank exactly one batch, as long as there are batches; at the end the fastest ranks go first."""
    grantable = horizon.reachable - sum(m.held for m in members)
    return _dealt_out(members, {m.rank: 1 for m in members}, grantable)


def _dealt_out(members: list[Member], most: dict[int, int], grantable: int) -> dict[int, int]:
    """Each rank what it holds, up to `most`; then the grantable batches, each to whoever would end earliest with it."""
    dealt = {m.rank: min(m.held, most[m.rank]) for m in members}
    if sum(max(0, most[m.rank] - m.held) for m in members) <= grantable:
        return {m.rank: most[m.rank] for m in members}
    ends = [(m.slack_ms + (dealt[m.rank] + 1) * m.ms, m.ms, m.rank) for m in members if dealt[m.rank] < most[m.rank]]
    heapq.heapify(ends)
    while grantable > 0 and ends:
        end, ms, rank = heapq.heappop(ends)
        dealt[rank] += 1
        grantable -= 1
        if dealt[rank] < most[rank]:
            heapq.heappush(ends, (end + ms, ms, rank))
    return dealt
