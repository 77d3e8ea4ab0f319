"""Thousands of seeded runs in virtual time, each with faults in it; every rule is checked at every event."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from flodl.simulation.__main__ import main
from flodl.simulation.soak import CERTAIN_PHASES, Survey, scenario, survey

SEEDS = 2000


@pytest.fixture(scope="module")
def surveys() -> list[Survey]:
    # spawn: a forked child would inherit whatever threads other tests have started.
    workers = min(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(survey, range(SEEDS), chunksize=25))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_seed_breaks_a_rule(surveys: list[Survey]) -> None:
    wrong = [found for found in surveys if found.problem]
    first = f"\nreplay: python -m flodl.simulation {wrong[0].seed}\n{wrong[0].problem}" if wrong else ""
    assert not wrong, f"{len(wrong)} of {SEEDS} seeds: {[found.seed for found in wrong[:20]]}{first}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_seed_has_a_death_or_a_late_join(surveys: list[Survey]) -> None:
    assert [found.seed for found in surveys if not found.problem and found.deaths + found.late_joins == 0] == []
    assert sum(found.late_joins > 0 for found in surveys) > SEEDS / 4
    assert sum(not found.is_failed for found in surveys) > SEEDS / 2


def test_a_scenario_is_a_function_of_its_seed() -> None:
    assert scenario(7) == scenario(7)
    assert scenario(7) != scenario(8)


def test_the_certain_fault_comes_in_every_phase() -> None:
    assert {scenario(seed).faults[0].when for seed in range(100)} == set(CERTAIN_PHASES)


def test_one_seed_can_be_replayed_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Scenario(")
    assert "'kind': 'commit'" in printed
    assert "EndRun(" in printed
    assert main(["3:5"]) == 0
    assert "2 seeds, 0 with a problem" in capsys.readouterr().out
    assert main(["x"]) == 2


@pytest.mark.parametrize("seed", [2558, 2838, 6151, 6283, 6451])
def test_a_seed_beyond_these_that_once_broke_a_rule_keeps_it(seed: int) -> None:
    assert survey(seed).problem == ""
