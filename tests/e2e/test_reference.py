"""A run is bit-equal to its schedule played by one process in plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from flodl import DiLoCo, Trainer  # noqa: E402
from flodl.records.schedule import read_lines  # noqa: E402
from tests.e2e import batchnorm  # noqa: E402
from tests.e2e.reference import reference  # noqa: E402

pytestmark = pytest.mark.e2e
Records = list[dict[str, Any]]


def run(directory: Path, mode: str, outer: Any) -> tuple[dict[str, torch.Tensor], Records]:
    """What a run of three unequal ranks ended with, and its schedule."""
    torch.set_num_threads(1)
    Trainer(
        entry="tests.e2e.batchnorm:parts",
        mode=mode,
        outer=outer,
        devices=["emulated:4ms", "emulated:9ms", "emulated:13ms"],
        batch_size=batchnorm.BATCH_SIZE,
        epochs=2,
        seed=3,
        anchor=4,
        run_directory=directory,
    ).run(quiet=True)
    return load_file(directory / "consensus.safetensors"), list(read_lines(directory / "schedule.jsonl"))


def differing(found: dict[str, torch.Tensor], records: Records, plan: dict[str, Any] | None = None) -> list[str]:
    """The tensors of which a bit is not as the reference has it."""
    expected = reference(batchnorm.parts(), plan or records[0]["plan"], records)
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


PLAIN, OUTER = None, DiLoCo(lr=0.7, momentum=0.9, min_window=1)
WARMED = DiLoCo(lr=0.7, momentum=0.9, min_window=12, warm="momentum")


@pytest.mark.parametrize(
    ("mode", "outer"),
    [
        *itertools.product(["cpu-sync", "cpu-cadence", "cpu-async"], [PLAIN, OUTER]),
        ("cpu-cadence", WARMED),
    ],
    ids=lambda value: value if isinstance(value, str) else value and f"{value.rule} {value.warm}",
)
def test_every_bit_follows_from_the_schedule(mode: str, outer: DiLoCo | None, tmp_path: Path) -> None:
    found, records = run(tmp_path / "run", mode, outer)
    assert differing(found, records) == []
    assert sum(record["kind"] == "commit" for record in records) > 5
    attempts = [record for record in records if record["kind"] == "attempt"]
    assert sum(c["samples"] for record in attempts for c in record["cohort"]) == 2 * batchnorm.SAMPLES
    if (mode, outer) != ("cpu-async", None):
        return
    for name, change in MUTATIONS.items():
        changed = copy.deepcopy(records)
        change(changed)
        assert differing(found, changed), f"the reference did not notice: {name}"


def _of(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def _shift_weight(records: Records) -> None:
    cohort = next(r["cohort"] for r in _of(records, "attempt") if len(r["cohort"]) > 1)
    cohort[0]["weight"] += 1e-6
    cohort[1]["weight"] -= 1e-6


def _drop_a_contribution(records: Records) -> None:
    next(r["cohort"] for r in _of(records, "attempt") if len(r["cohort"]) > 1).pop()


def _swap_ranks(records: Records) -> None:
    leases = _of(records, "lease")
    first = leases[0]
    second = next(r for r in leases if r["rank"] != first["rank"])
    first["batches"][0][1], second["batches"][0][1] = second["batches"][0][1], first["batches"][0][1]


def _adopt_earlier(records: Records) -> None:
    """As if an asynchronous rank had taken θ one batch before it did."""
    seals = {(r["rank"], r["generation"], r["round"]): r["step"] for r in _of(records, "seal")}
    ahead = (r for r in _of(records, "adopt") if r["step"] > seals.get((r["rank"], r["generation"], r["round"]), 10**9))
    next(ahead)["step"] -= 1


def _change_seed(records: Records) -> None:
    records[0]["plan"]["seed"] += 1


MUTATIONS: dict[str, Callable[[Records], None]] = {
    "a weight off by a millionth": _shift_weight,
    "a contribution less": _drop_a_contribution,
    "a batch trained by another rank": _swap_ranks,
    "an adoption one step earlier": _adopt_earlier,
    "another seed": _change_seed,
}
