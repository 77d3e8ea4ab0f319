"""The plan: every setting checked and named, plain values both ways, and no torch."""

import dataclasses
import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.errors import PlanError
from flodl.plan import (
    DiLoCo,
    LoaderPlan,
    OuterPlan,
    Plan,
    SlowMo,
    build_plan,
    differences,
    parse_device,
    plan_from_dict,
    plan_to_dict,
    setting_names,
    sources,
)
from flodl.plan.build import SECTIONS
from flodl.plan.section import setting_name
from tests.unit.fresh_python import output_of

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = math.nan, math.inf
TWO = ["cpu", "cpu"]

NOT_WHOLE = (True, 2.0, "2", None, NAN, [2], 2**63)
NOT_REAL = (True, "0.5", NAN, INF, -INF, [0.5], 10**400)
BAD: dict[str, tuple[object, ...]] = {
    "batch_size": (0, -1, *NOT_WHOLE),
    "epochs": (0, -3, 10**6 + 1, *NOT_WHOLE),
    "samples": (0, -1, True, 1.5, NAN),
    "seed": (-1, *NOT_WHOLE),
    "micro_batch": (0, True, 9, [], [4, 0], [9, 1], 2.0, "4"),
    "data_check": ("none", None, 1),
    "clip_grad_norm": (0.0, -1.0, True, NAN, INF),
    "anchor": (0, *NOT_WHOLE),
    "overhead_target": (0.0, 1.0, None, *NOT_REAL),
    "guard": ("trend", True, 1),
    "max_ratio": (0.5, None, *NOT_REAL),
    "gamma": (-0.1, None, *NOT_REAL),
    "wire_dtype": ("fp16", None, 16),
    "blend": ("overwrite", None),
    "alpha": (0.0, 1.5, *NOT_REAL),
    "respawn": (-1, *NOT_WHOLE),
    "max_failures": (-1, 1.5, -0.5, True, NAN, "1"),
    "detect_s": (0.0, -5.0, None, *NOT_REAL),
    "stall_s": (0.0, True, NAN, INF),
    "debug_rank": (-1, 2, True, 0.0),
    "eval_rank": (-1, 2, True, "0"),
    "checkpoint": ("", 3, b"runs", "a\0b"),
    "resume": (1, None, ""),
    "overwrite": (1, "yes", None),
    "checkpoint_keep": (0, True, None),
    "checkpoint_every_epochs": (0, 0.5, None),
    "outer": ("diloco", DiLoCo, True, {"lr": 0.7}),
    "loader": (2, "fork", None),
    "mode": ("cpu", None, "sync", "async", True, "solo"),
}


def plan_of(**settings: Any) -> Plan:
    return build_plan(**{"batch_size": 8, "devices": TWO, **settings})


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_refused_by_field_and_value_with_what_is_allowed(field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(PlanError) as caught:
            plan_of(**{field: value})
        first, second = str(caught.value).split("\n", 1)
        assert caught.value.field == field, value
        assert first.startswith(f"{field} = "), first
        assert second.startswith("Allowed: "), second
        assert len(second) > len("Allowed: .")


def test_every_setting_has_a_bad_value_above() -> None:
    assert {*BAD, "devices"} == set(setting_names())


def test_defaults() -> None:
    plan = build_plan(batch_size=8, devices="cpu")
    assert (plan.mode, plan.seed, plan.outer) == ("solo", 0, None)
    assert (plan.data.epochs, plan.data.samples, plan.data.micro_batch, plan.data.check) == (1, None, None, "content")
    assert plan.data.loader == LoaderPlan(0, "fork", 2, False, False)
    assert (plan.cadence.anchor, plan.cadence.overhead_target, plan.cadence.guard) == (10, 0.02, "level")
    assert (plan.averaging.gamma, plan.averaging.wire_dtype, plan.averaging.blend) == (1.0, "fp32", "delta")
    assert (plan.cluster.respawn, plan.cluster.max_failures, plan.cluster.detect_s) == (3, None, 5.0)
    assert (plan.checkpoint.directory, plan.checkpoint.resume, plan.checkpoint.keep) == (None, False, 3)


def test_whole_numbers_are_taken_as_floats_where_a_float_is_meant() -> None:
    plan = plan_of(gamma=1, detect_s=5, clip_grad_norm=2)
    assert type(plan.averaging.gamma) is type(plan.cluster.detect_s) is type(plan.training.clip_grad_norm) is float
    assert plan_to_dict(plan) == plan_to_dict(plan_of(gamma=1.0, detect_s=5.0, clip_grad_norm=2.0))


def test_numbers_of_numpy_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    plan = plan_of(batch_size=numpy.int64(8), gamma=numpy.float32(0.5))
    assert type(plan.data.batch_size) is int
    assert type(plan.averaging.gamma) is float
    with pytest.raises(PlanError, match="batch_size"):
        plan_of(batch_size=numpy.float64(8.0))


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PlanError, match=r"batchsize is not among the settings: did you mean batch_size\?") as caught:
        build_plan(batchsize=8)
    assert caught.value.field == "batchsize"
    assert "epochs" in str(caught.value)
    with pytest.raises(PlanError, match=r"worker is not among the settings of loader: did you mean workers\?"):
        plan_of(loader={"worker": 2})
    with pytest.raises(PlanError, match="xyzzy is not among the settings\n"):
        build_plan(batch_size=8, xyzzy=1)


def test_batch_size_has_no_default() -> None:
    with pytest.raises(PlanError, match="batch_size is not given"):
        build_plan(devices="cpu")


@pytest.mark.parametrize(
    ("devices", "mode", "resolved"),
    [
        ("cpu", "auto", "solo"),
        (["cpu"], "auto", "solo"),
        ("cuda:1", "auto", "solo"),
        ("emulated:47ms", "auto", "solo"),
        (["cpu"] * 3, "auto", "cpu-cadence"),
        (("emulated:10ms", "cpu"), "auto", "cpu-cadence"),
        (["cpu"], "cpu-async", "cpu-async"),
        (["cpu"] * 2, "cpu-sync", "cpu-sync"),
    ],
)
def test_mode(devices: Any, mode: str, resolved: str) -> None:
    plan = build_plan(batch_size=8, devices=devices, mode=mode)
    assert plan.mode == resolved
    assert plan.cluster.devices == ((devices,) if isinstance(devices, str) else tuple(devices))


@pytest.mark.parametrize("mode", ["collective-sync", "collective-cadence", "nccl-cadence", "nccl-async"])
def test_collective_modes_are_named_as_not_in_this_version(mode: str) -> None:
    with pytest.raises(PlanError, match="not in this version") as caught:
        plan_of(mode=mode)
    assert '"cpu-cadence"' in str(caught.value)
    assert caught.value.value == mode


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (0, 'a world size of 1 or more, written as a list such as ["cpu"] * 3'),
        (-1, "a world size of 1 or more"),
        (3, r'a list with one device per rank: ["cpu"] * 3'),
        ([], "at least one device"),
        (True, "a list with one device per rank"),
        (2.0, "a list with one device per rank"),
        (None, "a list with one device per rank"),
        ("gpu", '"cuda:N"'),
        ("mps", '"cuda:N"'),
        ("cuda:x", '"cuda:N"'),
        (["cpu", 3], '"emulated:47ms"'),
        (["cpu", "auto"], '"emulated:47ms"'),
        (["cuda:0", "cuda:1"], "one GPU alone"),
        (["cuda:0", "cpu"], "one GPU alone"),
        (["cpu"] * 4097, "at most 4096"),
    ],
)
def test_devices_that_cannot_be(devices: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        build_plan(batch_size=8, devices=devices)
    assert caught.value.field == "devices"
    assert says in str(caught.value)


def test_a_gpu_makes_no_rounds_yet() -> None:
    with pytest.raises(PlanError, match="solo with a GPU"):
        build_plan(batch_size=8, devices="cuda:0", mode="cpu-cadence")


@pytest.mark.parametrize(("gpus", "devices"), [(0, ("cpu",)), (1, ("cuda:0",))])
def test_automatic_devices(monkeypatch: pytest.MonkeyPatch, gpus: int, devices: tuple[str, ...]) -> None:
    monkeypatch.setattr(sources, "count_gpus", lambda: gpus)
    assert build_plan(batch_size=8).cluster.devices == devices


def test_several_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "count_gpus", lambda: 2)
    with pytest.raises(PlanError, match="this machine has cuda:0, cuda:1, and several GPUs at once are not"):
        build_plan(batch_size=8)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("cpu", ("cpu", 0, None, None, 0.0, 1.0)),
        ("cuda", ("cuda", 0, None, None, 0.0, 1.0)),
        ("cuda:3", ("cuda", 3, None, None, 0.0, 1.0)),
        ("emulated:47ms", ("emulated", 0, 47.0, None, 0.0, 1.0)),
        ("emulated:.5s", ("emulated", 0, 500.0, None, 0.0, 1.0)),
        ("emulated:cpu*4.7", ("emulated", 0, None, 4.7, 0.0, 1.0)),
        ("emulated:47ms,jitter=0.1,drift=1.5", ("emulated", 0, 47.0, None, 0.1, 1.5)),
        ("emulated:cpu*2, drift=0.5", ("emulated", 0, None, 2.0, 0.0, 0.5)),
    ],
)
def test_device_words(text: str, fields: tuple[object, ...]) -> None:
    assert dataclasses.astuple(parse_device(text)) == fields


@pytest.mark.parametrize(
    "text",
    [
        *("", "CPU", "cpu:0", "cuda:-1", "emulated", "emulated:", "emulated:47", "emulated:0ms", "emulated:-5ms"),
        *("emulated:1e9s", "emulated:nanms", "emulated:cpu*0.5", "emulated:cpu*", "emulated:gpu*2", "emulated:47ms,"),
        *("emulated:47ms,jitter", "emulated:47ms,jitter=x", "emulated:47ms,jitter=1", "emulated:47ms,jitter=-0.1"),
        *("emulated:47ms,drift=0", "emulated:47ms,drift=nan", "emulated:47ms,drift=inf", "emulated:47ms,speed=2"),
        *("emulated:47ms,jitter=0.1,jitter=0.1", "emulated:jitter=0.1,47ms"),
    ],
)
def test_device_words_that_mean_nothing(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_device(text)
    assert (caught.value.field, caught.value.value) == ("devices", text)


def test_emulated_durations() -> None:
    assert parse_device("cpu").step_ms(3.0, 0.5, 1.0) == 3.0
    assert parse_device("emulated:47ms").step_ms(3.0, 0.0, 0.0) == 47.0
    assert parse_device("emulated:47ms").step_ms(60.0, 0.0, 0.0) == 60.0, "never shorter than the real step"
    assert parse_device("emulated:cpu*4").step_ms(3.0, 1.0, -1.0) == 12.0
    drifting = parse_device("emulated:10ms,drift=2")
    assert [drifting.step_ms(1.0, done, 0.0) for done in (0.0, 0.5, 1.0)] == [10.0, 15.0, 20.0]
    jittery = parse_device("emulated:10ms,jitter=0.5")
    assert [jittery.step_ms(1.0, 0.0, draw) for draw in (-1.0, 0.0, 1.0)] == [5.0, 10.0, 15.0]


def test_micro_batch_per_device() -> None:
    plan = plan_of(micro_batch=[8, 2])
    assert [plan.data.micro_batch_of(rank) for rank in (0, 1)] == [8, 2]
    assert plan_of(micro_batch=4).data.micro_batch_of(1) == 4
    assert plan_of().data.micro_batch_of(1) == 8
    with pytest.raises(PlanError, match="one for each of 2 devices"):
        plan_of(micro_batch=[2, 2, 2])


def test_batches_of_an_epoch() -> None:
    whole, dropped = plan_of().data, plan_of(loader={"drop_last": True}).data
    assert (whole.samples_per_epoch(20), whole.batches_per_epoch(20)) == (20, 3)
    assert (dropped.samples_per_epoch(20), dropped.batches_per_epoch(20)) == (16, 2)
    assert (dropped.samples_per_epoch(16), dropped.batches_per_epoch(16)) == (16, 2)


def test_folders_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(checkpoint=Path("runs"), resume="auto")
    assert (plan.checkpoint.directory, plan.checkpoint.resume) == (str(tmp_path / "runs"), "auto")
    assert plan_of(resume="old").checkpoint.resume == str(tmp_path / "old")
    assert plan_of(checkpoint="runs", resume=True).checkpoint.resume is True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other file systems hold UTF-8 only")
def test_a_folder_of_checkpoints_whose_name_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(odd)
    monkeypatch.chdir(os.fsdecode(odd))
    for name in ("checkpoint", "resume"):
        with pytest.raises(PlanError, match=f"^{name} = .*checkpoints hold it as UTF-8\n") as caught:
            plan_of(**{name: "ck"})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"resume": "auto"}, "resume"),
        ({"resume": True}, "resume"),
        ({"overwrite": True}, "overwrite"),
        ({"overwrite": True, "checkpoint": "runs", "resume": "auto"}, "overwrite"),
    ],
)
def test_checkpoint_settings_that_contradict_each_other(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(**settings)
    assert caught.value.field == field


def test_outer_optimizers() -> None:
    assert DiLoCo() == OuterPlan("nesterov", 0.7, 0.9, 30, "stretch")
    assert SlowMo(lr=2) == OuterPlan("heavy_ball", 2.0, 0.5, 30, "stretch")
    assert plan_of(outer=SlowMo()).outer == SlowMo()
    for settings in ({"lr": 0.0}, {"momentum": 1.0}, {"lr": NAN}, {"min_window": -1}, {"warm": "up"}):
        with pytest.raises(PlanError) as caught:
            DiLoCo(**settings)  # type: ignore[arg-type]
        assert caught.value.field == "outer." + next(iter(settings))
    with pytest.warns(UserWarning, match="outer is not used"):
        build_plan(batch_size=8, devices="cpu", outer=DiLoCo())


def test_debug_rank_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sources.DEBUG_RANK, "1")
    assert plan_of().cluster.debug_rank == 1
    assert plan_of(debug_rank=0).cluster.debug_rank == 0
    monkeypatch.setenv(sources.DEBUG_RANK, "first")
    with pytest.raises(PlanError, match=r"FLODL_DEBUG_RANK = 'first'"):
        plan_of()


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of().data.epochs = 2  # type: ignore[misc]


plans = st.builds(
    plan_of,
    batch_size=st.integers(8, 4096),
    epochs=st.integers(1, 10**6),
    samples=st.none() | st.integers(1, 2**63 - 1),
    micro_batch=st.none() | st.integers(1, 8) | st.lists(st.integers(1, 8), min_size=2, max_size=2),
    seed=st.integers(0, 2**63 - 1),
    mode=st.sampled_from(["cpu-sync", "cpu-cadence", "cpu-async"]),
    gamma=st.floats(0, 8),
    clip_grad_norm=st.none() | st.floats(1e-6, 1e6),
    max_failures=st.none() | st.integers(0, 9) | st.floats(0.01, 1.0),
    outer=st.none() | st.builds(DiLoCo, lr=st.floats(0.01, 1.0)) | st.builds(SlowMo, min_window=st.integers(0, 99)),
    checkpoint=st.none() | st.just("runs/é"),
    resume=st.sampled_from([False, "elsewhere"]),
    loader=st.builds(LoaderPlan, workers=st.integers(0, 3), drop_last=st.booleans()),
)


@given(plans)
def test_a_plan_survives_json_and_msgpack(plan: Plan) -> None:
    values = plan_to_dict(plan)
    for copy in (json.loads(json.dumps(values)), msgspec.msgpack.decode(msgspec.msgpack.encode(values))):
        assert plan_from_dict(copy) == plan
        assert differences(values, copy) == []
        assert plan_to_dict(plan_from_dict(copy)) == values


def test_a_plan_from_elsewhere_is_checked() -> None:
    values = plan_to_dict(plan_of())
    with pytest.raises(PlanError, match="batch_size = 0"):
        plan_from_dict({**values, "data": {**values["data"], "batch_size": 0}})
    with pytest.raises(PlanError, match="colour is not among the fields of Plan"):
        plan_from_dict({**values, "colour": "red"})


def test_differences_name_the_dotted_field() -> None:
    a = plan_to_dict(plan_of())
    assert differences(a, plan_to_dict(plan_of(batch_size=32, gamma=0.5))) == [
        "averaging.gamma: 1.0 != 0.5",
        "data.batch_size: 8 != 32",
    ]
    assert differences(a, plan_to_dict(plan_of(devices=["cpu"] * 3))) == [
        "cluster.devices: ['cpu', 'cpu'] != ['cpu', 'cpu', 'cpu']"
    ]
    assert len(differences(a, plan_to_dict(plan_of(outer=DiLoCo())))) == 1
    one, share = plan_to_dict(plan_of(max_failures=1)), plan_to_dict(plan_of(max_failures=1.0))
    assert differences(one, share) == ["cluster.max_failures: 1 != 1.0"]
    assert differences({"seed": 1}, {}) == ["seed: 1 != not set"]


def test_every_setting_belongs_to_one_field() -> None:
    kinds = [kind for _, kind in SECTIONS]
    names = [setting_name(field) for kind in kinds for field in dataclasses.fields(kind) if "rule" in field.metadata]
    assert sorted([*names, "mode", "seed", "outer", "loader"]) == sorted(setting_names())


def test_the_table_of_settings_is_current() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "make_settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page, "run python tools/make_settings.py"
    assert all(f"| `{name}` |" in page for name in setting_names() if name not in ("outer", "loader"))


NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import flodl
from flodl.plan import build_plan
assert build_plan(batch_size=8).cluster.devices == ("cpu",)
trainer = flodl.Trainer(entry="parts:build", batch_size=8, devices=["cpu"] * 3, outer=flodl.DiLoCo())
print(trainer.plan.mode, "torch" in sys.modules, "numpy" in sys.modules)
"""
COST = """
import time
before = time.process_time()
import flodl
spent = time.process_time() - before
import sys
print(spent, [name for name in ("torch", "numpy", "rich", "click", "msgspec") if name in sys.modules])
"""


def test_flodl_plans_without_torch() -> None:
    assert output_of("-c", NO_TORCH) == "cpu-cadence False False"


def test_import_is_cheap() -> None:
    # Processor time, because the clock on the wall measures the neighbours too; the least of three for the same reason.
    outputs = [output_of("-c", COST).split(" ", 1) for _ in range(3)]
    assert min(float(spent) for spent, _ in outputs) < 0.15
    assert {names for _, names in outputs} == {"[]"}
