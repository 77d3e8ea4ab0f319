"""Set before any test module is imported: one OpenMP thread per process, because ranks share the cores."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples are the same in every run, and a slow machine is no failure.
settings.register_profile("flodl", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("flodl")


@pytest.fixture(autouse=True, scope="session")
def heeds_interrupts() -> None:
    """A shell without job control starts background commands with SIGINT ignored, and so would be all that the tests
    start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def heeds_hangup() -> Iterator[None]:
    """SIGHUP has its effect, here and in processes started now: under nohup both would ignore it."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)
