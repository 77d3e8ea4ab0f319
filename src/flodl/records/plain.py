"""One line for each thing worth a line: for logs, pipes and terminals that cannot move their cursor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from flodl.records.sink import Sink
from flodl.records.snapshot import Fold, Snapshot

STILL_ALIVE_S = 60.0
"""A run with nothing to say for so long says how far it is."""


class PlainView:
    """A view that writes sentences. A stream that went away ends the writing, not the run."""

    def __init__(self, stream: TextIO) -> None:
        self._sink = Sink(stream)
        self._fold = Fold()
        self._said_s = 0.0

    def record(self, record: dict[str, Any]) -> None:
        """Shows one line of the schedule, if it is worth a line."""
        self._fold.add(record)
        said = sentence(record, self._fold)
        if said is None and record["kind"] == "commit" and self._fold.last_s - self._said_s >= STILL_ALIVE_S:
            said = progress_line(self._fold.snapshot(self._fold.last_s))
        if said is not None:
            self._said_s = self._fold.last_s
            self._sink.write(line(self._said_s, said))

    def close(self) -> None:
        """Nothing is open: the stream is the caller's."""


def line(time_s: float, said: str) -> str:
    """With its newline; always one line."""
    return f"flodl {time_s:8.1f} s  {' '.join(said.split())}\n"


def sentence(record: Mapping[str, Any], fold: Fold) -> str | None:
    """What a person wants to hear of this record, already folded; None for most. Missing fields are left unsaid."""
    say = _SENTENCES.get(record["kind"])
    return None if say is None else say(record, fold)


def progress_line(snapshot: Snapshot) -> str:
    """How far the run is."""
    parts = [f"epoch {snapshot.epoch} of {snapshot.epochs}, {100 * snapshot.epoch_progress:.0f} %"]
    parts.append(f"{snapshot.rounds} rounds")
    if snapshot.loss is not None:
        parts.append(f"loss {figure(snapshot.loss)}")
    if snapshot.eta_s is not None:
        parts.append(f"{duration(snapshot.eta_s)} left")
    return "; ".join(parts)


def figure(value: Any) -> str:
    """Four digits of a number; a null, which JSON has for NaN and infinities, is "not finite"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not finite" if value is None else str(value)
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def duration(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def metrics_words(metrics: Mapping[str, Any]) -> str:
    """accuracy 0.91, top5 0.99."""
    return ", ".join(f"{name} {figure(value)}" for name, value in metrics.items())


def _phase(record: Mapping[str, Any], fold: Fold) -> str:
    reason = record.get("reason", "")
    return f"{record['phase']}: {reason}" if reason else str(record["phase"])


def _join(record: Mapping[str, Any], fold: Fold) -> str:
    restarts = fold.restarts(record["rank"])
    again = f" again (restart {restarts})" if restarts else ""
    return f"rank {record['rank']} is here{again}: {record['device']}"


def _refused(record: Mapping[str, Any], fold: Fold) -> str:
    return f"rank {record['rank']} is refused: {'; '.join(record['differences'])}"


def _exit(record: Mapping[str, Any], fold: Fold) -> str | None:
    """Only a death: the end of a run ends its ranks."""
    if not record["is_death"]:
        return None
    returned = record.get("returned", 0)
    batches = f"; its {returned} batches are dealt again" if returned else ""
    return f"{record['reason']}{batches}"


def _exclusion(record: Mapping[str, Any], fold: Fold) -> str:
    first = f" ({record['first']})" if record.get("first") else ""
    bad = record.get("quarantined", ())
    out = f"; {len(bad)} batches were so twice and are left out" if bad else ""
    return f"rank {record['rank']} is left out of round {record['round']}: not finite{first}{out}"


def _epoch(record: Mapping[str, Any], fold: Fold) -> str:
    said = f"epoch {record['epoch'] + 1} of {fold.epochs} is done: loss {figure(record['loss'])}"
    said += f", {record['samples']} samples"
    return said if record.get("round") is None else f"{said}, round {record['round']}"


def _evaluation(record: Mapping[str, Any], fold: Fold) -> str:
    return f"evaluation after epoch {record['epoch'] + 1}: {metrics_words(record['metrics']) or 'no metrics'}"


def _warning(record: Mapping[str, Any], fold: Fold) -> str:
    return f"warning: {record['reason']}"


def _guard(record: Mapping[str, Any], fold: Fold) -> str | None:
    return f"warning: {record['reason']}; the window is halved" if record["word"] == "halve" else None


def _absent(record: Mapping[str, Any], fold: Fold) -> str:
    return f"warning: the launcher did not run for {record['seconds']:.1f} s; nobody is blamed for it"


_SENTENCES: dict[str, Callable[[Mapping[str, Any], Fold], str | None]] = {
    "phase": _phase,
    "join": _join,
    "refused": _refused,
    "exit": _exit,
    "exclusion": _exclusion,
    "epoch": _epoch,
    "evaluation": _evaluation,
    "warning": _warning,
    "guard": _guard,
    "absent": _absent,
}
