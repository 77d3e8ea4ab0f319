"""A rank is killed or stopped at a random moment: the run ends, counts exactly, stalls briefly and leaves nothing."""

from __future__ import annotations

import random
import shutil
import statistics
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.e2e.torture import BUDGET_S, SIGNALS, hurt
from tests.e2e.whole_runs import go_on, kill_after_a_checkpoint

pytestmark = pytest.mark.e2e
WHOLE_RUNS = 50
MODES = ("cpu-cadence", "cpu-async", "cpu-sync")


@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("seed", range(5))
def test_a_hurt_run_counts_every_batch_once(kind: str, seed: int, tmp_path: Path) -> None:
    hurt(seed, MODES[seed % 3], SIGNALS[kind], tmp_path / "run")


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "runs"), [("kill", 100), ("stop", 30)])
def test_many_hurt_runs_stall_within_the_budget(kind: str, runs: int, tmp_path: Path) -> None:
    wounds = [hurt(1000 + n, MODES[n % 3], SIGNALS[kind], tmp_path / f"run{n}") for n in range(runs)]
    stalls = sorted(w.stall_s for w in wounds if w.stall_s is not None)
    deaths = sum(w.deaths for w in wounds)
    print(
        f"\n{kind}: seeds 1000..{999 + runs}; {len(stalls)} blows, {deaths} deaths, "
        f"{sum(w.recomputed for w in wounds)} batches recomputed; "
        f"stall median {statistics.median(stalls):.3f} s, worst {stalls[-1]:.3f} s (budget {BUDGET_S[kind]:.1f} s)"
    )
    assert len(stalls) > runs / 2
    assert statistics.median(stalls) <= BUDGET_S[kind]


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_many_whole_runs_go_on_after_a_kill_at_any_number_of_ranks(tmp_path: Path) -> None:
    kills = 0
    for seed in range(WHOLE_RUNS):
        mode = ("cpu-cadence", "cpu-async")[seed % 2]
        place = tmp_path / f"run{seed}"
        kill_after_a_checkpoint(mode, place, random.Random(seed).uniform(0.0, 1.5))
        kills += 1
        for world_size in (1, 2, 3, 5) if seed < 2 else ((1, 2, 3, 5)[seed // 2 % 4],):
            go_on(mode, place, world_size, place / f"ranks{world_size}")
        shutil.rmtree(place)
    print(f"\n{kills} whole runs killed, seeds 0..{WHOLE_RUNS - 1}, and gone on with 1, 2, 3 or 5 ranks")
