"""Emulated devices: how long a step lasts, and cores and threads of the real one."""

import random
import time
from pathlib import Path

import pytest

from flodl.devices.cpu import threads_per_rank, usable_cores
from flodl.devices.emulated import STEPS_MEASURED, Pad, sharpen_sleep
from flodl.plan.device import parse_device


class FakeTime:
    """Sleeping takes exactly as long as asked, or the given share of it, as a woken sleep may."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 100.0
        self.share = share
        self.sleeps = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += max(seconds * self.share, 1e-6)

    def pad(self, device: str) -> Pad:
        return Pad(parse_device(device), self.clock, self.sleep)


def step(pad: Pad, fake: FakeTime, raw_ms: float, done: float = 0.0, seed: int = 0) -> float:
    """How many milliseconds a step lasted whose real work took raw_ms."""
    started = fake.now
    fake.now += raw_ms / 1e3
    pad.hold(started, done, seed)
    return 1e3 * (fake.now - started)


def test_a_step_lasts_as_long_as_the_device_says_from_its_start() -> None:
    fake = FakeTime()
    pad = fake.pad("emulated:47ms")
    assert [round(step(pad, fake, raw), 6) for raw in (0.0, 13.0, 46.9)] == [47.0, 47.0, 47.0]
    assert (pad.steps, pad.raw_over_pad) == (3, 0)


def test_a_sleep_that_ends_early_is_taken_up_again() -> None:
    fake = FakeTime(share=0.5)
    assert step(fake.pad("emulated:10ms"), fake, 1.0) >= 10.0
    assert fake.sleeps > 1


def test_a_step_longer_than_its_pad_is_counted_and_not_slept() -> None:
    fake = FakeTime()
    pad = fake.pad("emulated:10ms")
    assert step(pad, fake, 12.0) == pytest.approx(12.0)
    assert (pad.raw_over_pad, fake.sleeps) == (1, 0)


def test_a_factor_multiplies_the_median_of_the_first_steps() -> None:
    fake = FakeTime()
    pad = fake.pad("emulated:cpu*4")
    for _ in range(STEPS_MEASURED):
        assert step(pad, fake, 5.0) == pytest.approx(20.0)
    assert step(pad, fake, 9.0) == pytest.approx(20.0)  # calibrated: a slow step does not stretch the pad
    assert pad.raw_over_pad == 0


def test_jitter_belongs_to_the_batch_and_stays_within_its_bounds() -> None:
    fake = FakeTime()
    pad = fake.pad("emulated:100ms,jitter=0.2")
    lasted = [step(pad, fake, 0.0, seed=seed) for seed in range(50)]
    assert min(lasted) >= 80.0 - 1e-6
    assert max(lasted) <= 120.0 + 1e-6
    assert max(lasted) - min(lasted) > 20.0
    assert step(pad, fake, 0.0, seed=7) == pytest.approx(lasted[7])


def test_jitter_leaves_the_generators_of_training_alone() -> None:
    fake = FakeTime()
    random.seed(1)
    expected = random.random()
    random.seed(1)
    step(fake.pad("emulated:100ms,jitter=0.2"), fake, 0.0)
    assert random.random() == expected


def test_drift_changes_the_pad_over_the_run() -> None:
    fake = FakeTime()
    pad = fake.pad("emulated:10ms,drift=3")
    assert [round(step(pad, fake, 0.0, done), 6) for done in (0.0, 0.5, 1.0)] == [10.0, 20.0, 30.0]


def test_a_real_pad_ends_at_its_deadline_and_burns_no_processor() -> None:
    sharpen_sleep()
    pad = Pad(parse_device("emulated:10ms"))
    late_ms, busy = [], time.process_time()
    for _ in range(30):
        started = time.perf_counter()
        pad.hold(started, 0.0, 0)
        late_ms.append(1e3 * (time.perf_counter() - started) - 10.0)
    busy = time.process_time() - busy
    assert min(late_ms) >= 0.0
    assert sorted(late_ms)[5] < 0.5  # others may hold the core; a sixth of the steps must come through
    assert busy < 0.1


def test_cores_are_bounded_by_the_groups_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(lambda: 8, tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(lambda: 8, tmp_path) == 8
    (tmp_path / "cpu.max").write_text("10000 100000\n")
    assert usable_cores(lambda: 8, tmp_path) == 1


def test_cores_are_bounded_by_an_old_groups_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(lambda: 8, tmp_path) == 3
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(lambda: 8, tmp_path) == 8


def test_ranks_share_the_cores_and_have_one_at_least() -> None:
    assert [threads_per_rank(ranks, cores=8) for ranks in (1, 3, 8, 20)] == [8, 2, 1, 1]
