"""What the launcher makes of a plan before anything starts, and its signals."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import NativeError
from flodl.plan import DiLoCo, LoaderPlan, build_plan, plan_to_dict
from flodl.processes.launcher import LaunchRequest, controller_settings, refuse_platform
from flodl.processes.signals import Signals


def request_of(length: int = 103, **settings: Any) -> LaunchRequest:
    plan = build_plan(**{"mode": "cpu-async", "devices": ["cpu"] * 3, "batch_size": 10, "seed": 0, **settings})
    return LaunchRequest(plan, length, "r", "/tmp/r", ("python", "t.py"), "/tmp", {}, evaluates=True)


def test_the_plan_reaches_the_controller() -> None:
    request = request_of(epochs=3, samples=250, anchor=7, gamma=0.5, respawn=1, max_failures=0.5, eval_rank=2)
    settings = controller_settings(request)
    assert (settings.world_size, settings.mode, settings.epochs, settings.samples) == (3, "cpu-async", 3, 250)
    assert (settings.dataset_length, settings.batches_per_epoch) == (103, 11)
    assert (settings.anchor, settings.gamma, settings.respawn, settings.max_failures) == (7, 0.5, 1, 0.5)
    assert (settings.evaluates, settings.eval_rank, settings.stall_s) == (True, 2, None)
    assert settings.plan == plan_to_dict(request.plan)


@pytest.mark.parametrize(
    ("cores", "script_s", "settings", "limit_s"),
    [
        (8, 0.0, {}, 60.0),
        (8, 19.0, {}, 60.0),
        (8, 40.0, {}, 120.0),
        (2, 40.0, {}, 180.0),  # three ranks on two cores
        (8, 40.0, {"stall_s": 500.0}, 500.0),
        (8, 40.0, {"stall_s": 5.0}, 120.0),
        (8, 40.0, {"debug_rank": 1}, math.inf),
    ],
)
def test_a_rank_may_take_as_long_to_start_as_its_script_needs(
    monkeypatch: pytest.MonkeyPatch, cores: int, script_s: float, settings: dict[str, Any], limit_s: float
) -> None:
    monkeypatch.setattr("flodl.devices.cpu.usable_cores", lambda: cores)
    request = dataclasses.replace(request_of(**settings), script_s=script_s)
    assert controller_settings(request).start_limit_s == limit_s


def test_a_dropped_last_batch_is_in_no_epoch() -> None:
    settings = controller_settings(request_of(loader=LoaderPlan(drop_last=True, workers=3, prefetch=4)))
    assert (settings.dataset_length, settings.batches_per_epoch, settings.prefetch) == (100, 10, 12)


@pytest.mark.parametrize(
    ("outer", "window"), [(None, 0), (DiLoCo(min_window=25), 25), (DiLoCo(min_window=25, warm="none"), 0)]
)
def test_a_window_is_stretched_where_the_outer_step_wants_it(outer: object, window: int) -> None:
    assert controller_settings(request_of(outer=outer)).outer_min_window == window


@pytest.mark.parametrize(
    ("mode", "blend", "is_elastic"),
    [("cpu-async", "elastic", True), ("cpu-async", "delta", False), ("cpu-cadence", "elastic", False)],
)
def test_the_guard_bears_the_spread_that_the_elastic_blend_keeps(mode: str, blend: str, is_elastic: bool) -> None:
    assert controller_settings(request_of(mode=mode, blend=blend)).is_elastic is is_elastic


def test_no_limit_holds_while_a_rank_is_debugged() -> None:
    assert controller_settings(request_of(debug_rank=1, stall_s=5.0)).stall_s == math.inf


def test_windows_is_refused_with_the_way_out() -> None:
    refuse_platform("linux")
    refuse_platform("darwin")
    with pytest.raises(NativeError, match="solo") as caught:
        refuse_platform("win32")
    assert caught.value.install_page


@pytest.fixture
def pipe() -> Any:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.usefixtures("heeds_hangup")
def test_signals_become_bytes_and_the_former_handlers_come_back(pipe: tuple[int, int]) -> None:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
    former = [signal.getsignal(number) for number in names]
    with Signals(pipe[1]) as signals:
        for number in names:
            signal.raise_signal(number)
            signals.taken(number)
        assert list(os.read(pipe[0], 100)) == list(names)
    assert [signal.getsignal(number) for number in names] == former
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_nobody_took_has_its_former_effect_at_the_end(pipe: tuple[int, int]) -> None:
    def interrupted() -> None:
        with Signals(pipe[1]):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_ignored_signal_stays_ignored(pipe: tuple[int, int]) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(pipe[1]):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(BlockingIOError):
            os.read(pipe[0], 1)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_other_threads_leave_signals_alone(pipe: tuple[int, int]) -> None:
    seen: list[Any] = []

    def enter() -> None:
        with Signals(pipe[1]):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_the_launchers_side_imports_no_torch() -> None:
    program = (
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import flodl.processes.launcher, flodl.records.schedule\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=Path(__file__).parent)
