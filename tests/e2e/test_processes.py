"""Runs of real processes under the real controller: they end well or with the right words, and leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

from flodl.errors import PlanError, RunFailed
from flodl.processes.launcher import launch
from flodl.records.schedule import read_lines
from flodl.records.views import make_view
from tests.e2e.small_launcher import SAMPLES, request_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]
BATCHES = {(epoch, index) for epoch in range(2) for index in range(SAMPLES // 4)}
# Short, and long enough that two busy cores starve nobody for so long.
DETECT_S = 1.5
LAUNCHER = str(Path(__file__).with_name("small_launcher.py"))


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Polls; a condition that does not come about fails the test."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what} did not happen in {seconds} s"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The letter of /proc/<pid>/stat; '' when there is no such process, or only its remains."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if letter in "ZX" else letter


def records(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(directory / "schedule.jsonl") if line["kind"] == kind]


def contributed(directory: Path) -> Counter[tuple[int, int]]:
    """How often each batch was contributed, by the journal."""
    ranges = [piece for line in read_lines(directory / "journal.jsonl") for piece in line["contributed"]]
    return Counter((epoch, index) for epoch, first, count in ranges for index in range(first, first + count))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a run"


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Descriptors, threads, signal handlers and children of this process are the same after the test as before."""
    gc.collect()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)

    def held() -> tuple[object, ...]:
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
            [signal.getsignal(number) for number in numbers],
        )

    before = held()
    yield
    gc.collect()
    assert held() == before


@pytest.mark.parametrize("mode", ["cpu-sync", "cpu-cadence", "cpu-async"])
def test_a_run_ends_with_its_files(directory: Path, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = launch(request_of(directory, mode=mode))
    assert contributed(directory) == Counter(BATCHES)
    assert (result["phase"], result["samples"], result["recomputed"]) == ("done", 2 * SAMPLES, 0)
    assert (result["mode"], result["devices"], result["world_size"]) == (mode, ["cpu", "cpu"], 2)
    assert result == json.loads((directory / "result.json").read_text())
    assert result["committed_round"] == result["rounds"] > 0
    assert 0.0 < result["training_s"] < result["wall_s"]
    with safetensors.safe_open(directory / "consensus.safetensors", framework="numpy") as file:
        weight, bias = file.get_tensor("layer.weight"), file.get_tensor("bias")
        assert file.metadata()["hash"] == result["consensus_hash"]
    assert (weight.shape, bias.shape) == ((5, 3), ())
    assert (weight == bias).all()
    if mode == "cpu-sync":
        # Each round adds the mean of ones.
        assert bias == result["rounds"]
    head = next(read_lines(directory / "schedule.jsonl"))
    assert (head["kind"], head["threads"]["rank"], head["plan"]["mode"]) == ("head", 1, mode)
    commits = [line["round"] for line in read_lines(directory / "journal.jsonl")]
    assert commits == list(range(result["rounds"] + 1))
    printed = capfd.readouterr().out
    for rank in range(2):
        said = (directory / f"rank-{rank}.log").read_text()
        assert said.startswith(f"rank {rank} leaves after")
        assert f"[rank {rank}] {said}" in printed
    assert sorted(path.name for path in directory.iterdir()) == [
        "consensus.safetensors",
        "journal.jsonl",
        "rank-0.log",
        "rank-1.log",
        "result.json",
        "schedule.jsonl",
    ]


def test_efficiency_is_of_measured_rates(directory: Path) -> None:
    result = launch(request_of(directory, epochs=6, quiet=True, environment={"SMALL_RANK_MS": "5"}))
    assert result["E_basis"].startswith("in-run rates")
    rates = [4000.0 / rank["ms_per_batch"] for rank in result["ranks"]]
    pauses = [sum(rank["pauses_s"].values()) for rank in result["ranks"]]
    capacity = sum(rate * (result["training_s"] - pause) for rate, pause in zip(rates, pauses, strict=True))
    assert result["E"] == pytest.approx(6 * SAMPLES / capacity)
    assert result["E_wall"] == pytest.approx(6 * SAMPLES / sum(rates) / result["wall_s"])


@pytest.mark.parametrize("deed", ["kill", "garbage", "close link", "silence", "leave a child"])
def test_a_death_costs_no_batch_and_the_rank_comes_back(directory: Path, deed: str) -> None:
    deeds = ("rank=1", "life=0", "at=1", f"deed={deed}", "waits=12")
    result = launch(request_of(directory, deeds, detect_s=DETECT_S, environment={"SMALL_RANK_MS": "5"}))
    assert contributed(directory) == Counter(BATCHES)
    assert result["deaths"] == 1, result["degraded"]
    started = records(directory, "process_started")
    assert [(line["rank"], line["generation"]) for line in started] == [(0, 0), (1, 1), (1, 2)]
    dead = next(line for line in records(directory, "process_ended") if line["generation"] == 1)
    assert dead["code"] == (5 if deed == "leave a child" else -signal.SIGKILL)
    assert dead["steps_started"] == 1
    assert all(state_of(line["pid"]) == "" for line in started)
    reasons = " ".join(line["reason"] for line in records(directory, "killed") + records(directory, "evict"))
    expected = {"garbage": "rank 1 sent a message of", "close link": "it closed its link", "silence": "silent for 1."}
    assert expected.get(deed, "") in reasons
    if deed == "leave a child":
        assert state_of(int((directory / "child.pid").read_text())) == ""


def test_a_rank_that_is_stopped_before_it_says_hello_is_replaced_within_detect_s(directory: Path) -> None:
    result = launch(request_of(directory, ("rank=1", "life=0", "deed=stop at once"), detect_s=DETECT_S))
    (evicted,) = records(directory, "evict")
    assert (evicted["rank"], evicted["generation"]) == (1, 1)
    assert evicted["reason"].startswith("evicted: stopped by a signal for ")
    assert (result["phase"], result["deaths"]) == ("done", 1)


def test_what_a_rank_raised_is_in_the_callers_exception(directory: Path) -> None:
    with pytest.raises(RunFailed, match=r"ValueError: batch \(0, \d+\) is bad") as caught:
        launch(request_of(directory, ("rank=1", "at=2", "deed=raise")))
    assert "Traceback of rank 1:" in str(caught.value)
    assert caught.value.rank_traceback.startswith("Traceback of rank 1:")
    assert caught.value.log_path == str(directory / "rank-1.log")
    assert (directory / "rank-1.log").read_text() == "about to fail\n"
    result = json.loads((directory / "result.json").read_text())
    assert (result["phase"], result["committed_round"]) == ("failed", 0)
    # The state that the run began with was committed, and is kept.
    with safetensors.safe_open(directory / "consensus.safetensors", framework="numpy") as file:
        assert file.metadata()["round"] == "0"


@pytest.mark.parametrize(
    ("deed", "words", "tail"),
    [
        ("import error", "rank 0 exited with code 1", "ImportError: no module named 'the users own fault'"),
        ("end early", "script ended without reaching its run()", "nothing to do here"),
    ],
)
def test_a_rank_that_never_says_hello_ends_the_run(directory: Path, deed: str, words: str, tail: str) -> None:
    with pytest.raises(RunFailed) as caught:
        launch(request_of(directory, ("rank=0", f"deed={deed}"), quiet=True))
    lines = str(caught.value).splitlines()
    assert words in lines[0]
    assert str(directory / "rank-0.log") in lines[1]
    assert lines[-1] == tail
    assert not (directory / "consensus.safetensors").exists()


def test_a_command_that_cannot_be_started_is_named(directory: Path) -> None:
    with pytest.raises(RunFailed, match="no-such-interpreter"):
        launch(request_of(directory, command=("no-such-interpreter", "train.py")))


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="run_directory"):
        launch(request_of(tmp_path / "file" / "run"))


def test_a_view_sees_every_record_and_may_fail(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class View:
        def __init__(self, breaks_at: int) -> None:
            self.seen: list[dict[str, Any]] = []
            self.closed = 0
            self.breaks_at = breaks_at

        def record(self, record: dict[str, Any]) -> None:
            if len(self.seen) == self.breaks_at:
                raise RuntimeError("no colours left")
            self.seen.append(record)

        def close(self) -> None:
            self.closed += 1

    view = View(breaks_at=-1)
    launch(request_of(directory, view=view, epochs=1))
    assert [line["kind"] for line in view.seen] == [line["kind"] for line in read_lines(directory / "schedule.jsonl")]
    assert view.closed == 1
    broken = View(breaks_at=3)
    assert launch(request_of(directory.with_name("another"), view=broken, epochs=1))["phase"] == "done"
    assert (len(broken.seen), broken.closed) == (3, 1)
    assert capfd.readouterr().err.count("no colours left") == 1


def test_a_view_on_stdout_has_it_for_itself(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch(request_of(directory, view=make_view("json", None), epochs=1))
    printed, beside = capfd.readouterr()
    assert {json.loads(line)["kind"] for line in printed.splitlines()} >= {"epoch", "snapshot"}
    assert "[rank 1] rank 1 leaves after" in beside


def test_a_launch_outside_the_main_thread_works(directory: Path) -> None:
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(launch(request_of(directory, epochs=1))))
    thread.start()
    thread.join(30.0)
    assert results[0]["phase"] == "done"


class Launched:
    """A launcher as a process of its own."""

    def __init__(self, directory: Path, deeds: tuple[str, ...] = (), batch_ms: int = 20, **settings: Any) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, LAUNCHER, str(directory), json.dumps({"epochs": 50, **settings}), *deeds],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SMALL_RANK_MS": str(batch_ms)},
        )

    def is_training(self) -> bool:
        assert self.process.poll() is None, self.output()
        journal = self.directory / "journal.jsonl"
        return journal.exists() and sum(1 for _ in read_lines(journal)) >= 3

    def pids(self) -> list[int]:
        return [line["pid"] for line in records(self.directory, "process_started")]

    def output(self) -> str:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            return stdout.read()

    def end(self) -> tuple[int, str]:
        said = self.output()
        return self.process.wait(20.0), said


@pytest.fixture
def launched(directory: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(*deeds: str, **settings: Any) -> Launched:
        made.append(Launched(directory, deeds, **settings))
        until(made[-1].is_training, "three commits")
        return made[-1]

    yield start
    for run in made:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.usefixtures("heeds_hangup")
def test_the_first_signal_saves_and_ends(launched: Callable[..., Launched], number: int, code: int) -> None:
    run = launched()
    run.process.send_signal(number)
    ended, said = run.end()
    assert ended == code, said
    assert all(state_of(pid) == "" for pid in run.pids())
    result = json.loads((run.directory / "result.json").read_text())
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert result["interrupted"] == name
    assert result["committed_round"] >= 2
    with safetensors.safe_open(run.directory / "consensus.safetensors", framework="numpy") as file:
        assert file.metadata()["hash"] == result["consensus_hash"]
    codes = {line["code"] for line in records(run.directory, "process_ended")}
    assert codes == {0}, said


def test_the_second_signal_ends_at_once(launched: Callable[..., Launched]) -> None:
    run = launched("rank=1", "deed=ignore stop", "at=-1")
    run.process.send_signal(signal.SIGINT)
    until(lambda: state_of(run.pids()[0]) == "", "rank 0's exit")
    assert state_of(run.pids()[1]) != ""
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    ended, said = run.end()
    assert ended == -signal.SIGINT, said
    assert time.monotonic() - began < 3.0
    assert all(state_of(pid) == "" for pid in run.pids())


def test_a_killed_launcher_takes_its_ranks_along(launched: Callable[..., Launched]) -> None:
    run = launched()
    run.process.kill()
    run.process.wait()
    until(lambda: not any(state_of(pid) for pid in run.pids()), "the end of the ranks", seconds=5.0)


def test_a_full_disk_costs_records_and_not_the_run(launched: Callable[..., Launched]) -> None:
    """No file of the launcher may grow beyond 8 KiB from here on."""
    limit = 8 << 10
    run = launched(epochs=6, devices=["cpu"], mode="cpu-sync", batch_ms=2)
    hard = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
    ended, said = run.end()
    assert ended == 0, said
    schedule = run.directory / "schedule.jsonl"
    assert schedule.stat().st_size == limit
    assert said.count(f"cannot write {schedule}: File too large") == 1
    assert json.loads((run.directory / "result.json").read_text())["samples"] == 6 * SAMPLES
    assert next(read_lines(schedule))["kind"] == "head"


def test_a_stopped_launcher_stops_its_ranks_and_nobody_is_blamed(launched: Callable[..., Launched]) -> None:
    run = launched(epochs=3, detect_s=DETECT_S)
    pids = run.pids()
    run.process.send_signal(signal.SIGTSTP)
    until(lambda: state_of(run.process.pid) == "T" and all(state_of(pid) == "T" for pid in pids), "the stop")
    # Longer than detect_s and than what a judge may oversleep: this time must age nobody.
    time.sleep(DETECT_S + 0.7)
    assert all(state_of(pid) == "T" for pid in pids)
    run.process.send_signal(signal.SIGCONT)
    ended, said = run.end()
    assert ended == 0, said
    result = json.loads((run.directory / "result.json").read_text())
    assert (result["phase"], result["degraded"]) == ("done", [])
    assert result["wall_s"] > result["training_s"] + 1.5


def test_a_launcher_that_was_stopped_alone_goes_on(launched: Callable[..., Launched]) -> None:
    run = launched(epochs=3, detect_s=DETECT_S)
    run.process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(run.process.pid) == "T", "the stop")
    # As long as a rank may be silent, and more than a judge may oversleep: the time itself is what is tested.
    time.sleep(DETECT_S + 0.7)
    run.process.send_signal(signal.SIGCONT)
    ended, said = run.end()
    assert ended == 0, said
    assert json.loads((run.directory / "result.json").read_text())["degraded"] == []
