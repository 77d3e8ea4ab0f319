"""How long a simulated run stands still, and whether it had to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flodl.protocol.messages import Commit, Continue, Window
from flodl.simulation.rank import Health, SimRank
from flodl.simulation.scenario import Scenario

STALL_MS = 1000.0
"""Survivors of an exit do no step for no longer; where a rank fell silent, detection comes on top."""
DETECT_MS = 5000.0


class Waiting:
    """Two bounds. Nobody at all works: STALL_MS. One rank waits: STALL_MS and two of the longest windows dealt so far.

    For each rank that fell silent lately, detection comes on top.
    """

    def __init__(self, scenario: Scenario, complain: Callable[[str], Exception]) -> None:
        self._scenario = scenario
        self._complain = complain
        self._longest_ms = 4.0 * max(scenario.step_ms)
        self._silences: list[float] = []
        self._quiet_since = 0.0

    def told(self, sim: SimRank, message: object) -> None:
        window: Window | None = message.window if isinstance(message, Commit | Continue) else None
        if window is not None and window.batches is not None:
            step_ms = sim.costs.step_ms()
            self._longest_ms = max(self._longest_ms, window.batches * step_ms, 4.0 * step_ms)

    def slowed(self, step_ms: float) -> None:
        self._longest_ms = max(self._longest_ms, 4.0 * step_ms)

    def silenced(self, now: float) -> None:
        self._silences.append(now)

    def check(self, now: float, until: float, ranks: Mapping[int, SimRank], is_open: bool) -> None:
        """Nothing happens between `now` and `until`."""
        running = [sim for sim in ranks.values() if sim.health is Health.RUNNING and sim.steps_started]
        idle = [sim for sim in running if sim.idle_since is not None]
        since = now - 2.0 * DETECT_MS - STALL_MS
        patience = DETECT_MS * sum(at > since for at in self._silences)
        if not is_open or len(idle) < len(running) or not running:
            self._quiet_since = until
        elif until - self._quiet_since > STALL_MS + patience:
            who = f"ranks {[s.rank for s in running]} stand idle since {self._quiet_since:.0f} ms"
            raise self._complain(f"{who}, and nothing else happens")
        limit = STALL_MS + 2.0 * self._longest_ms + self._scenario.evaluation_ms + patience
        for sim in idle:
            if sim.idle_since is not None and until - sim.idle_since > limit:
                waited = f"{until - sim.idle_since:.0f} ms"
                raise self._complain(f"rank {sim.rank} has waited for {waited} (limit {limit:.0f})")
