"""The table at the foot of the terminal while a run trains; deaths, epochs and warnings are printed above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from flodl.records.plain import duration, figure, line, metrics_words, sentence
from flodl.records.snapshot import Fold, RankSnapshot, Snapshot
from flodl.records.terminal import Foot

if TYPE_CHECKING:
    from rich.console import Console

LEAST_INTERVAL_S = 0.25
LONGEST_INTERVAL_S = 2.0
COST_SHARE = 0.001
"""Drawing costs no more of one core than this, or is done every LONGEST_INTERVAL_S."""

HEADINGS = ("rank", "device", "state", "share", "ms/batch", "window", "loss", "restarts")
_LEFT = (1, 2)
_SHOWN_IN_TABLE = frozenset({"phase", "join"})


class LiveView:
    """A view for a terminal. clock: monotonic seconds; make_console: a rich Console on the stream, made at the first
    drawing, so that rich is imported while the ranks start and not before."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        make_console: Callable[[TextIO], Console] | None = None,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._make_console = make_console or _console_on
        self._console: Console | None = None
        self._foot = Foot(stream)
        self._fold = Fold()
        self._heard_at = clock()
        self._due_at = self._heard_at + LEAST_INTERVAL_S
        self._is_closed = False

    def record(self, record: dict[str, Any]) -> None:
        """Takes one line of the schedule. The table shows it at the next tick()."""
        self._fold.add(record)
        self._heard_at = self._clock()
        if record["kind"] not in _SHOWN_IN_TABLE:
            said = sentence(record, self._fold)
            if said is not None:
                self._foot.say(line(self._fold.last_s, said))

    def tick(self) -> None:
        """Draws if it is time; the clock on the screen goes on between two records."""
        if self._clock() >= self._due_at:
            self._draw()

    def close(self) -> None:
        """Draws the end, which stays on the screen, and gives the streams back."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._draw()
        finally:
            self._foot.end()

    def _draw(self) -> None:
        began = self._clock()
        self._due_at = began + LONGEST_INTERVAL_S  # also where drawing fails
        if self._console is None:
            self._console = self._make_console(self._stream)
            self._foot.begin()
            began = self._clock()
        snapshot = self._fold.snapshot(self._fold.last_s + max(0.0, began - self._heard_at))
        self._foot.draw(render(snapshot, self._console))
        cost_s = self._clock() - began
        self._due_at = began + min(LONGEST_INTERVAL_S, max(LEAST_INTERVAL_S, cost_s / COST_SHARE))


def render(snapshot: Snapshot, console: Console) -> str:
    """The table as text with the console's colours: whole lines, fewer than the console is high, none too wide."""
    from rich.text import Text

    lines = table(snapshot, max_lines=console.height - 1)
    text = Text("\n".join(lines))
    text.stylize("bold", 0, len(lines[0]))
    text.highlight_words(("lost", "evicted", "refused", "failed"), "bold red")
    text.highlight_words(("starting", "joined", "waiting"), "yellow")
    with console.capture() as captured:
        console.print(text, highlight=False, no_wrap=True, overflow="ellipsis", crop=True)
    return captured.get()


def table(snapshot: Snapshot, max_lines: int) -> list[str]:
    """Two lines about the run, the headings, a line for each rank; ranks that find no room are counted."""
    lines = [_title(snapshot), _progress(snapshot)]
    room = max(1, max_lines - len(lines) - 1)
    ranks = snapshot.ranks
    if len(ranks) > room:
        ranks = ranks[: max(1, room - 1)]
    if ranks:
        lines += _aligned([HEADINGS, *(_cells(rank) for rank in ranks)])
    hidden = len(snapshot.ranks) - len(ranks)
    return [*lines, f"and {hidden} more"] if hidden else lines


def _title(snapshot: Snapshot) -> str:
    parts = [f"flodl {snapshot.mode}", snapshot.phase, duration(snapshot.elapsed_s)]
    if snapshot.phase == "training" and snapshot.eta_s is not None:
        parts.append(f"{duration(snapshot.eta_s)} left")
    elif snapshot.reason:
        parts.append(" ".join(snapshot.reason.split()))
    return "   ".join(parts)


def _progress(snapshot: Snapshot) -> str:
    parts = [f"epoch {snapshot.epoch} of {snapshot.epochs}, {100 * snapshot.epoch_progress:.0f} %"]
    parts.append(f"round {snapshot.rounds}")
    if snapshot.anchor is not None:
        parts.append(f"anchor {snapshot.anchor}")
    if snapshot.drift is not None:
        parts.append(f"drift {figure(snapshot.drift)}")
    if snapshot.loss is not None:
        parts.append(f"loss {figure(snapshot.loss)}")
    if snapshot.metrics:
        parts.append(metrics_words(snapshot.metrics))
    return "   ".join(parts)


def _cells(rank: RankSnapshot) -> tuple[str, ...]:
    is_measured = rank.window > 0
    return (
        str(rank.rank),
        rank.device,
        rank.state,
        f"{100 * rank.share:.1f} %",
        "-" if rank.ms_per_batch is None else f"{rank.ms_per_batch:.1f}",
        str(rank.window) if is_measured else "-",
        figure(rank.loss) if is_measured else "-",
        str(rank.restarts),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in _LEFT else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _console_on(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream)
