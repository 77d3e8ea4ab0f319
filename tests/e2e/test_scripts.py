"""Scripts that do what scripts do: they wait, write files, use threads, are stopped and killed. Two real ranks each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from flodl.records.schedule import read_lines
from tests.unit.fresh_python import SOURCE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]
ROOT = str(Path(__file__).resolve().parents[2])
SCRIPT = """
import os, subprocess, sys, threading, time
from pathlib import Path
import flodl
from flodl.plan import role
from tests.e2e.bad_parts import parts

def train(**changes):
    settings = {"batch_size": 4, "devices": ["cpu"] * 2, "anchor": 2, "seed": 1, "run_directory": "run"} | changes
    return flodl.Trainer(**settings).run(quiet=True)
"""
WAITS_BEFORE_RUN = """
if role() is not None:
    Path(f"waits-{os.getpid()}").touch()
    time.sleep(600)
train(**parts())
"""
HAS_CHILDREN = """
if role() is not None:
    subprocess.Popen(["sleep", "600"])
slow = lambda info: time.sleep(0.02)
if __name__ == "__main__":
    train(**parts(callbacks=[slow]), epochs=1000, loader={"workers": 1})
"""
HANGS_IN_A_LOADER = """
class Endless:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        Path("reads").touch()
        time.sleep(600)

if __name__ == "__main__":
    train(**parts(data=Endless()), devices="cpu", data_check="structure", loader={"workers": 1})
"""
IN_A_THREAD = """
notes = open(f"notes-{role().rank}.txt" if role() else "notes.txt", "w")
table = open(f"table-{role().rank}.bin" if role() else "table.bin", "wb")

def note(info):
    notes.write(f"{info.epoch}\\n")
    table.write(b".")

thread = threading.Thread(target=lambda: print(train(**parts(callbacks=[note])).metrics[0]["samples"]))
thread.start()
thread.join()
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    """Polls; a condition that does not come about fails the test."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what} did not happen in {seconds} s"
        time.sleep(0.02)


def states_in(directory: Path) -> dict[int, str]:
    """The letter of /proc/<pid>/stat of every process that works in this folder; those that are dead are none."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == str(directory):
                found[int(name)] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # not ours, or gone
            continue
    return {pid: letter for pid, letter in found.items() if letter not in "ZX"}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts the body as a user's program in the test's folder; whatever works there still is killed in the end."""

    def start(body: str) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(SCRIPT + body)
        inherited = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
        return subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": os.pathsep.join([SOURCE, ROOT]), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield start
    for pid in states_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def kill(process: subprocess.Popen[str], directory: Path) -> None:
    """The launcher alone; everything that it started must be gone within the time that the design gives."""
    process.kill()
    process.wait()
    until(lambda: not states_in(directory), "the end of everything that was started", seconds=5.0)
    assert process.stdout is not None
    process.stdout.close()


def test_ranks_that_have_not_reached_their_run_end_with_a_killed_launcher(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = started(WAITS_BEFORE_RUN)
    until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "the start of two ranks")
    kill(process, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_everything_ends_with_a_launcher_that_is_killed_while_it_is_stopped(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process = started(HAS_CHILDREN)
    journal = tmp_path / "run" / "journal.jsonl"
    until(lambda: journal.exists() and sum(1 for _ in read_lines(journal)) >= 3, "three commits")
    pids = states_in(tmp_path)
    assert len(pids) == 7, "a launcher, and two ranks with a loader and a child each"
    process.send_signal(number)
    stopped = pids if number == signal.SIGTSTP else {process.pid}
    until(lambda: all(states_in(tmp_path).get(pid) == "T" for pid in stopped), "the stop")
    kill(process, tmp_path)


def test_a_loader_process_that_hangs_in_an_item_ends_with_its_run(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = started(HANGS_IN_A_LOADER)
    until((tmp_path / "reads").exists, "the reading of an item")
    kill(process, tmp_path)


def test_a_run_in_a_thread_trains_and_files_that_ranks_left_open_are_whole(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = started(IN_A_THREAD)
    said, _ = process.communicate(timeout=100)
    assert (process.returncode, said) == (0, "48\n")
    lines = [(tmp_path / f"notes-{rank}.txt").read_text() for rank in range(2)]
    assert "".join(lines) == "0\n" * 12
    assert [(tmp_path / f"table-{rank}.bin").stat().st_size for rank in range(2)] == [len(text) / 2 for text in lines]
