"""The demo's figures: a table for people, one document for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.bench.demo_setting import Setting, accuracy_of
from flodl.bench.efficiency import Efficiency
from flodl.checkpoint.files import write_json
from flodl.result import RunResult


@dataclass(frozen=True)
class Figures:
    """Of both runs. rates: what each device does alone, in steps per second."""

    setting: Setting
    alone: RunResult
    together: RunResult
    rates: dict[str, float]

    @property
    def efficiency(self) -> Efficiency:
        return Efficiency.of(self.together, self.setting.devices, self.rates)

    @property
    def speed_up(self) -> float:
        """Of training, without start-up and end."""
        return float(self.alone.raw["training_s"] / self.together.raw["training_s"])

    @property
    def best_speed_up(self) -> float:
        """If no device ever waited."""
        devices = self.setting.devices
        return sum(self.rates[device] for device in devices) / self.rates[devices[0]]

    def say(self, say: Callable[[str], None]) -> None:
        """As tables."""
        found = self.efficiency
        say("")
        say(f"{'':24}{'accuracy':>10}{'wall time':>12}{'training':>12}")
        for name, result in (("fast device alone", self.alone), ("three together", self.together)):
            wall, training = result.wall_s, result.raw["training_s"]
            say(f"{name:24}{percent(accuracy_of(result)):>10}{wall:>10.1f} s{training:>10.1f} s")
        say("")
        say(f"{'rank':24}{'alone':>14}{'share':>9}")
        for rank, device in enumerate(self.setting.devices):
            share = percent(self.together.shares[rank])
            say(f"{rank} {device:22}{self.rates[device]:>6.1f} steps/s{share:>9}")
        say("")
        say(
            f"E {found.e:.3f}, E_wall {found.e_wall:.3f} (start-up, tests and saving counted), "
            f"{self.together.rounds} rounds."
        )
        say(
            f"Training was {self.speed_up:.2f} times as fast as alone; by what each device does alone, "
            f"{self.best_speed_up:.2f} times is possible."
        )

    def as_dict(self) -> dict[str, Any]:
        found = self.efficiency
        ranks = [
            {"rank": rank, "device": device, "steps_per_s_alone": self.rates[device], "share": share}
            for rank, (device, share) in enumerate(zip(self.setting.devices, self.together.shares, strict=True))
        ]
        together = {**run_figures(self.together), "ranks": ranks, "E": found.e, "E_wall": found.e_wall}
        return {
            "alone": run_figures(self.alone),
            "together": together,
            "speed_up": self.speed_up,
            "best_speed_up": self.best_speed_up,
        }


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


def run_figures(result: RunResult) -> dict[str, Any]:
    """One run: accuracy of its end, times in seconds, every epoch's metrics."""
    return {
        "accuracy": accuracy_of(result),
        "wall_s": result.wall_s,
        "training_s": result.raw["training_s"],
        "batches": result.raw["batches"],
        "rounds": result.rounds,
        "shares": result.shares,
        "epochs": result.metrics,
        "degraded": result.degraded,
        "run_directory": result.run_directory,
    }


def write_figures(path: Path, document: dict[str, Any]) -> None:
    """What is not finite becomes null. Raises OSError."""
    write_json(path, document)
