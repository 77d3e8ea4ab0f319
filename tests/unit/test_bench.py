"""The benchmarks at sizes that mean nothing: which rows there are and what they hold, never how fast anything was.

What decides (E, budgets, memory, bounds) is tested on figures given by hand.
"""

import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flodl import native
from flodl.bench import bulk, demo, efficiency, kernels, load, memory, workloads
from flodl.bench.bandwidth import Bandwidth, measure_bandwidth, median_of
from flodl.bench.efficiency import Alone, Case, Efficiency, emulated_cases, row_of
from flodl.bench.kernels import Arrays, _TorchStep, _works, bench_kernels
from flodl.bench.load import LoadMeter, Usage
from flodl.bench.memory import Held, Sample
from flodl.bench.round import CASES, RoundCase, Schedule, _round_row
from flodl.bench.rows import Row, line_of, report
from flodl.bench.sizes import format_size, parse_size
from flodl.cli import bench as cli
from flodl.errors import NativeError, PlanError
from flodl.result import RunResult, make_result

QUIET = Usage(1.0, 0.5, 0.0)


# Sizes


@pytest.mark.parametrize(
    ("text", "count"), [("190M", 190_000_000), ("2.5k", 2500), ("1G", 1_000_000_000), ("2000", 2000), ("4m", 4_000_000)]
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_size(text) == count
    assert parse_size(format_size(count)) == count


@pytest.mark.parametrize("text", ["", "M", "12x", "0", "-3M", "999", "5G", "1.0005k", "nan", "1e400"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(PlanError, match=r"^params is") as refused:
        parse_size(text)
    assert refused.value.field == "params"


# Devices alone


def test_a_rate_alone_counts_the_steps_made_over_as_many_epochs_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Trained:
        """A trainer whose 63 steps (a short last batch in each of three epochs) took 10 ms each after the first."""

        def __init__(self, **settings: Any) -> None:
            asked.update(settings)

        def run(self, quiet: bool) -> Any:
            raw = {"training_s": 0.62 + 0.5, "first_step_ms": 500.0, "step_ms": 10.0, "batches": 63, "raw_over_pad": 0}
            return type("Result", (), {"raw": raw})

    monkeypatch.setattr(efficiency, "Trainer", Trained)
    alone = efficiency.measure_alone(Case("", "solo", ("cpu",), "some:entry", 64, 24), "cpu", 1, steps=60)
    assert (asked["epochs"], asked["samples"]) == (3, 61 * 64)
    assert alone.rate == pytest.approx(100.0)


# Rows


ROWS = [
    Row("a case", "flodl", "E", 0.98, "", 1.0, 0.98, ">= 0.97", True, "as it should be"),
    Row("a case", "flodl", "E", 0.90, "", 1.0, 0.90, ">= 0.97", False),
    Row("a case", "flodl", "E", 0.99, "", 1.0, 0.99, ">= 0.97", None, "void: 3 %"),
    Row("a case", "gloo", "round", 0.7, "s"),
]


def test_the_report_shows_every_row_and_writes_what_machines_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    report(ROWS, str(path))
    shown = capsys.readouterr().out
    for words in ("gloo", "MISSED", "void", "as it should be", "0.7 s", ">= 0.97"):
        assert words in shown
    document = json.loads(path.read_text())
    assert set(document) == {"commit", "machine", "rows"}
    assert document["machine"]["usable_cores"] >= 1
    assert [row["ok"] for row in document["rows"]] == [True, False, None, None]
    assert set(document["rows"][0]) == {
        *("case", "subject", "metric", "value", "unit", "bound", "ratio", "budget", "ok", "note")
    }


def test_a_line_says_value_bound_and_verdict() -> None:
    assert line_of(ROWS[0]) == "a case: flodl E 0.98, 0.980 of 1, budget >= 0.97: ok (as it should be)"
    assert "MISSED" in line_of(ROWS[1])
    assert "void" in line_of(ROWS[2])
    assert line_of(ROWS[3]) == "a case: gloo round 0.7 s"


def test_a_missed_budget_ends_with_status_1_after_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli._show(ROWS, None)
    assert end.value.code == 1
    assert "gloo" in capsys.readouterr().out
    cli._show([ROWS[0], ROWS[2], ROWS[3]], None)


# The load of others


def test_own_work_is_counted_as_own() -> None:
    meter = LoadMeter()
    before = load.own_cpu_s()
    total = 0
    while load.own_cpu_s() - before < 0.2:
        total += sum(range(1000))
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    usage = meter.usage()
    assert usage.own * usage.seconds >= 0.2
    assert usage.foreign is None or usage.foreign >= 0.0


def test_where_idle_time_is_unknown_so_is_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_busy_s", lambda: None)
    usage = LoadMeter().usage()
    assert usage.foreign is None
    assert usage.words == "foreign load unknown"


# The probe and the kernels


def test_the_probe_moves_what_it_times() -> None:
    a, b = torch.zeros(1 << 19), torch.arange(1 << 19, dtype=torch.float32)
    found = measure_bandwidth(a, b, threads=2)
    assert torch.equal(a, b)
    assert found.copy > 0.0
    assert found.update > 0.0
    assert found.read > 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threads": 0, "streams": 1}, "threads"),
        ({"threads": 1, "streams": 3}, "streams"),
        ({"threads": 1, "streams": 1, "kind": "swim"}, "copy, update, read"),
    ],
)
def test_the_probe_refuses_by_name(arguments: dict[str, Any], words: str) -> None:
    tensor = torch.zeros(1024)
    settings = {"kind": "update", **arguments}
    with pytest.raises(NativeError, match=words):
        native.stream_probe(settings.pop("kind"), tensor, **settings)


def test_the_probe_wants_the_source_of_a_copy_apart_from_its_end() -> None:
    tensor = torch.zeros(1024)
    with pytest.raises(NativeError, match="src"):
        native.stream_probe("copy", tensor, threads=1, streams=1)
    with pytest.raises(NativeError, match="overlaps"):
        native.stream_probe("copy", tensor, tensor, threads=1, streams=1)


def test_a_bound_adds_what_is_copied_and_what_is_updated() -> None:
    around = Bandwidth(copy=10.0, update=20.0, read=6.0)
    assert around.seconds(40.0, 60.0) == pytest.approx(7.0)
    assert around.best(Bandwidth(copy=5.0, update=30.0, read=7.0)) == Bandwidth(10.0, 30.0, 7.0)


def test_what_mostly_reads_is_bound_by_its_reads() -> None:
    around = Bandwidth(copy=10.0, update=20.0, read=6.0)
    assert around.seconds(40.0, read=20.0) == pytest.approx(4.0)
    assert around.seconds(40.0, read=30.0) == pytest.approx(5.0)


def test_the_middle_of_several_measurements_is_taken_of_each_kind() -> None:
    measured = [Bandwidth(1.0, 9.0, 5.0), Bandwidth(2.0, 8.0, 4.0), Bandwidth(3.0, 7.0, 6.0)]
    assert median_of(measured) == Bandwidth(2.0, 8.0, 5.0)


def test_the_kernels_bench_has_flodl_and_its_peer_for_each_work() -> None:
    threads = torch.get_num_threads()
    try:
        found = list(bench_kernels(200_000, 3, repeats=1, threads=1))
    finally:
        torch.set_num_threads(threads)
    works = ("weighted sum + statistics", "outer step", "outer step into arenas", "gather", "copy_hash")
    assert {row.case for row in found} == {f"{work} 3 x 200k" for work in works}
    for work in works:
        of_work = [row for row in found if row.case == f"{work} 3 x 200k"]
        assert [(row.subject == "flodl", row.metric) for row in of_work] == [
            *((True, "throughput"), (False, "throughput"), (True, "transient"), (False, "transient"))
        ]
    for row in found:
        assert math.isfinite(row.value)
        assert row.value >= 0.0
        if row.metric == "throughput":
            assert row.bound is not None
            assert row.ratio is not None
            assert "foreign load" in row.note
        assert (row.ok is None) == (row.budget == "")
    budgets = [row.budget for row in found if row.subject == "flodl" and row.metric == "throughput"]
    assert budgets == [">= 0.9", ">= 0.85", ">= 0.85", "", ""]


def test_flodl_in_pieces_on_two_threads_and_torch_take_the_same_outer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", 7_000)
    threads = torch.get_num_threads()
    try:
        own, peer = Arrays(50_000, 2), Arrays(50_000, 2)
        for arrays in (own, peer):
            generator = torch.Generator().manual_seed(1)
            for tensor in (arrays.theta_prev, arrays.out, arrays.velocity):
                tensor.copy_(torch.randn(50_000, generator=generator))
        _works(own, 2)[2].flodl()
        _TorchStep(peer)(peer.inputs)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(own.out, peer.theta_prev)
    torch.testing.assert_close(own.velocity, peer.velocity)
    for arena in (*own.inputs, *peer.inputs):
        torch.testing.assert_close(arena, own.out)


# E


def result_of(batches: int, training_s: float, pauses: list[float], over: int = 0) -> RunResult:
    ranks = [
        {
            "batches": batches // len(pauses),
            "share": 1 / len(pauses),
            "pauses_s": {"first batch": pause},
            "raw_over_pad": over,
        }
        for pause in pauses
    ]
    raw = {"batches": batches, "training_s": training_s, "ranks": ranks, "rounds": 7, "wall_s": 2 * training_s}
    return make_result(raw, "nowhere")


def test_e_is_work_done_over_work_possible_less_declared_pauses() -> None:
    rates = {"fast": 10.0, "slow": 2.0}
    found = Efficiency.of(result_of(108, 10.0, [1.0, 0.0]), ("fast", "slow"), rates)
    assert found.e == pytest.approx(108 / (10.0 * 9.0 + 2.0 * 10.0))
    assert found.e_wall == pytest.approx(108 / (12.0 * 20.0))


@pytest.mark.parametrize(
    ("batches", "over", "ok", "words"),
    [
        (98, 0, True, "98 batches"),
        (90, 0, False, "90 batches"),
        (98, 2, None, "void: 2.0 % of the raw steps"),
        (101, 0, False, "accounting fault: E is over 1.005"),
    ],
)
def test_a_figure_is_kept_missed_void_or_a_fault(batches: int, over: int, ok: bool | None, words: str) -> None:
    case = Case("x", "cpu-cadence", ("fast",), budget=0.97)
    alone = {"fast": Alone(10.0, 90.0, 0.0, QUIET)}
    row = row_of(case, result_of(batches, 10.0, [0.0], over), alone, QUIET)
    assert row.ok is ok
    assert words in row.note
    assert "foreign load 0.00 cores" in row.note


def test_e_over_one_is_void_where_others_worked_while_the_devices_were_alone() -> None:
    case = Case("x", "cpu-cadence", ("fast",), budget=0.97)
    alone = {"fast": Alone(10.0, 90.0, 0.0, Usage(1.0, 0.5, 1.5))}
    row = row_of(case, result_of(110, 10.0, [0.0]), alone, QUIET)
    assert row.ok is None
    assert "void: other work took 1.50 cores more" in row.note
    assert row_of(case, result_of(99, 10.0, [0.0]), alone, QUIET).ok is True


def test_a_device_that_was_too_slow_alone_makes_the_figure_void() -> None:
    case = Case("x", "cpu-cadence", ("fast",), budget=0.97)
    alone = {"fast": Alone(10.0, 90.0, 0.02, QUIET)}
    assert row_of(case, result_of(99, 10.0, [0.0]), alone, QUIET).ok is None


def test_cases_are_named_by_mode_and_steps_and_have_their_budget() -> None:
    found = emulated_cases("10,47,47", ("cpu-cadence", "cpu-async"))
    assert [(case.name, case.budget) for case in found] == [
        ("cpu-cadence 10,47,47", 0.97),
        ("cpu-async 10,47,47", 0.97),
    ]
    (other,) = emulated_cases("10,200", ("cpu-async",))
    assert other.budget == 0.95
    assert other.devices == ("emulated:10ms", "emulated:200ms")
    with pytest.raises(PlanError, match=r"^--step-ms is 'ten'"):
        emulated_cases("ten", ("cpu-async",))


# Memory


def test_a_segment_is_the_ranks_own_unless_several_ranks_see_it() -> None:
    arenas, theta = [("0:1", 1), ("0:1", 2)], ("0:1", 9)
    launcher = Held(100, {arenas[0]: 500, arenas[1]: 500, theta: 40, ("0:1", 10): 7})
    ranks = tuple(Held(30 + k, {arenas[k]: 500, theta: 30}) for k in range(2))
    sample = Sample(launcher, ranks)
    assert sample.rank_bytes() == [1030, 1031]
    assert sample.host_bytes() == 100 + (40 + 30 + 30) + 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_holds_its_anonymous_pages_and_each_segment() -> None:
    before = memory.held_by()
    segment = native.SharedMemory.create(8 << 20)
    segment.prefault()
    # Not from an allocator, which may have pages left over; what else this process gives back meanwhile is less.
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    filled.write(b"x" * (64 << 20))
    after = memory.held_by(os.getpid())
    filled.close()
    new = [size for key, size in after.shared.items() if key not in before.shared]
    assert sum(new) == 8 << 20
    assert 48 << 20 <= after.own - before.own <= 192 << 20


# Rounds


def test_a_round_is_timed_from_the_last_seal_to_the_last_adoption() -> None:
    schedule = Schedule()
    for number in (0, 1):
        at = 10.0 * number
        for rank, seal in enumerate([1.0, 1.5]):
            schedule.record({"kind": "seal", "round": number, "rank": rank, "time_s": at + seal})
            if rank:
                schedule.record({"kind": "commit", "round": number, "time_s": at + 2.0, "seconds": 0.2})
        for rank, adopt in enumerate([2.8, 3.0]):
            schedule.record({"kind": "adopt", "round": number, "rank": rank, "time_s": at + adopt})
    (found,) = schedule.rounds().values()
    assert found == pytest.approx({"total": 1.5, "reduce": 0.3, "commit": 0.2, "adopt": 1.0})


def test_memory_is_measured_once_all_have_adopted_a_round() -> None:
    measured: list[int] = []

    def measure() -> Bandwidth:
        measured.append(len(schedule.records))
        return Bandwidth(1.0, 1.0, float(len(measured)))

    schedule = Schedule(measure=measure)
    for rank in range(2):
        schedule.record({"kind": "process_started", "rank": rank, "pid": 100 + rank})
    for number in (0, 1):
        schedule.record({"kind": "commit", "round": number, "time_s": 1.0, "seconds": 0.1})
        for rank in range(2):
            assert len(measured) == number
            schedule.record({"kind": "adopt", "round": number, "rank": rank, "time_s": 2.0})
    assert measured == [5, 8]
    assert {number: around.read for number, around in schedule.around.items()} == {0: 1.0, 1: 2.0}


def test_a_round_is_judged_by_the_memory_just_after_it() -> None:
    parts = {"total": 3.0, "reduce": 2.0, "commit": 0.0, "adopt": 1.0}
    fast, slow = Bandwidth(4e6, 4e6, 4e6), Bandwidth(1e6, 1e6, 1e6)
    case = RoundCase("x", 100_000, 3)
    row = _round_row(case, [({**parts, "total": 1.2}, fast), ({**parts, "total": 4.8}, slow), (parts, fast)], "quiet")
    assert row.ratio == pytest.approx(1.2)
    assert row.ok is True
    assert row.value == 3.0
    assert "copy 0.0" in row.note
    assert "quiet" in row.note


def test_the_traffic_of_a_round_is_that_of_the_design() -> None:
    assert CASES["3x190M"].streams == (10, 0)
    assert CASES["2x100M-diloco"].streams == (8, 2)
    assert RoundCase("", 1000, 4).streams == (13, 0)


def test_the_bulk_model_has_the_parameters_that_its_entry_names() -> None:
    parts = getattr(bulk, bulk.entry_of(10_007).partition(":")[2])()
    model = parts["model"]()
    assert sum(p.numel() for p in model.body) == 10_007
    assert len(model.body) == 50
    batch = (torch.ones(1, 1),)
    parts["loss"](model, batch).backward()
    assert model.head.grad is not None
    assert model.body[0].grad is None
    full = getattr(bulk, bulk.entry_of(10_007, has_gradients=True).partition(":")[2])()
    full["loss"](model, batch).backward()
    assert all(p.grad is not None and p.grad.numel() == p.numel() for p in model.parameters())
    with pytest.raises(AttributeError):
        bulk.bulk_many  # noqa: B018


# The demo


def test_the_demos_entry_carries_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, str | None]] = []

    def lenet(lr: float, directory: str | None) -> dict[str, Any]:
        given.append((lr, directory))
        return {"model": None, "evaluate": None}

    monkeypatch.setattr(workloads, "lenet", lenet)
    for lr, directory in ((0.05, None), (0.0125, str(tmp_path / "a folder ü"))):
        for is_tested in (True, False):
            entry = workloads.lenet_entry(lr, directory, is_tested)
            parts = getattr(workloads, entry.partition(":")[2])()
            assert given[-1] == (lr, directory)
            assert ("evaluate" in parts) == is_tested
    with pytest.raises(AttributeError):
        workloads.lenet_fast  # noqa: B018


def test_a_slow_machine_learns_fewer_images_and_says_so() -> None:
    said: list[str] = []
    assert demo._batches_in_time(1876, 20.0, said.append) == 1876
    assert said == []
    fewer = demo._batches_in_time(1876, 200.0, said.append)
    assert fewer * 0.2 * (1 + 1 / (1 + 2 / 4.7)) <= demo.TRAINING_S
    assert f"{fewer * 64} images" in said[0]


# Whole commands, small


def run_bench(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a command run in a process of its own; a missed budget is no failure at these sizes."""
    path = tmp_path / "rows.json"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-c", "from flodl.cli.main import main; main()", "bench", *arguments, "--json", str(path)],
        cwd=tmp_path,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert path.exists(), done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert done.returncode == int(any(row["ok"] is False for row in found)), done.stderr
    return found


def test_help_of_every_bench_is_there() -> None:
    assert set(cli.bench.commands) == {"efficiency", "kernels", "overhead", "round"}
    for name in cli.bench.commands:
        assert CliRunner().invoke(cli.bench, [name, "--help"]).exit_code == 0


def test_a_wrong_size_is_refused_before_anything_starts() -> None:
    for arguments in (["kernels", "--params", "many"], ["round", "--params", "many"]):
        result = CliRunner().invoke(cli.bench, arguments)
        assert isinstance(result.exception, PlanError)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_small_round_with_peer_and_memory(tmp_path: Path) -> None:
    found = run_bench(tmp_path, "round", "--params", "200k", "--ranks", "2", "--outer", "--rounds", "3")
    assert [(row["subject"], row["metric"]) for row in found] == [
        ("flodl", "round"),
        ("gloo", "round"),
        ("flodl", "times faster than gloo"),
        ("flodl", "memory of a rank"),
        ("flodl", "memory of the host"),
    ]
    flodl, gloo, gain, *_ = (row["value"] for row in found)
    assert flodl > 0.0
    assert gain == pytest.approx(gloo / flodl)
    assert 0.0 < found[0]["ratio"] < math.inf
    assert found[0]["bound"] > 0.0
    assert [row["budget"] for row in found[3:]] == ["<= 2 M + 64 MiB", "<= 3 M + 64 MiB"]
    assert "foreign load" in found[0]["note"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_short_efficiency_run(tmp_path: Path) -> None:
    (row,) = run_bench(tmp_path, "efficiency", "--step-ms", "10,20", "--seconds", "2", "--mode", "cpu-cadence")
    assert (row["case"], row["metric"], row["budget"]) == ("cpu-cadence 10,20", "E", ">= 0.95")
    assert row["value"] > 0.1
    assert "E_wall" in row["note"]
