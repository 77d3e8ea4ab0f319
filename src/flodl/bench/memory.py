"""What the processes of a run hold, each page counted once. Linux.

Shared memory by proportional set size (PSS): the shares of all processes that map a segment add up to it. Of the rest
only anonymous pages: the code of libraries is the same whatever the model.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+)\s*(.*)$")
_SHARED = ("/memfd:", "/dev/shm", "/dev/zero", "/SYSV")


@dataclass(frozen=True)
class Held:
    """Of one process, in bytes. shared: PSS of each segment of shared memory, by (device, inode); own: anonymous."""

    own: int
    shared: Mapping[tuple[str, int], int] = field(default_factory=dict)


def held_by(pid: int | str = "self") -> Held:
    """Raises OSError for a process that is gone."""
    own = 0
    shared: dict[tuple[str, int], int] = defaultdict(int)
    segment: tuple[str, int] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (head := _HEAD.match(line)) is not None:
            is_shared = any(head[3].startswith(name) for name in _SHARED)
            segment = (head[1], int(head[2])) if is_shared else None
        elif line.startswith("Pss:") and segment is not None:
            shared[segment] += 1024 * int(line.split()[1])
        elif line.startswith("Anonymous:") and segment is None:
            own += 1024 * int(line.split()[1])
    return Held(own, dict(shared))


@dataclass(frozen=True)
class Sample:
    """The processes of a run at one moment."""

    launcher: Held
    ranks: tuple[Held, ...]

    @classmethod
    def take(cls, ranks: Iterable[int]) -> Sample:
        return cls(held_by(os.getpid()), tuple(held_by(pid) for pid in ranks))

    def rank_bytes(self) -> list[int]:
        """Of each rank: what only it holds, and the segments that it shares with the launcher alone."""
        readers = self._readers()
        totals = self._totals()
        return [
            rank.own + sum(totals[segment] for segment in rank.shared if readers[segment] == 1) for rank in self.ranks
        ]

    def host_bytes(self) -> int:
        """Of the launcher: what only it holds, and the segments that several ranks see, or none."""
        readers = self._readers()
        return self.launcher.own + sum(size for segment, size in self._totals().items() if readers[segment] != 1)

    def _readers(self) -> dict[tuple[str, int], int]:
        """How many ranks map each segment."""
        readers: dict[tuple[str, int], int] = defaultdict(int)
        for rank in self.ranks:
            for segment in rank.shared:
                readers[segment] += 1
        return readers

    def _totals(self) -> dict[tuple[str, int], int]:
        """Each segment once: the processes' shares add up to it."""
        totals: dict[tuple[str, int], int] = defaultdict(int)
        for held in (self.launcher, *self.ranks):
            for segment, size in held.shared.items():
                totals[segment] += size
        return totals
