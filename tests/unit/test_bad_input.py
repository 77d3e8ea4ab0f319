"""Bad input, given to flodl.Trainer: it works, or it is refused before the first batch with field, value and remedy.

What needs ranks of its own is in tests/e2e/test_bad_input.py.
"""

import inspect
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from flodl import Trainer
from flodl.checkpoint.document import CONSENSUS
from flodl.checkpoint.folder import find_checkpoints
from flodl.errors import CheckpointError, PlanError, RunFailed
from flodl.plan import setting_names, sources
from flodl.rank.callbacks import BatchInfo
from tests.unit.test_plan import BAD

HERE = "tests.unit.test_bad_input"
SAMPLES = 24
TWO = ["cpu"] * 2


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x.to(self.line.weight.dtype)).float()


def points(count: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, generator=draw), torch.randn(count, 2, generator=draw))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def parts(**changes: Any) -> dict[str, Any]:
    base = {"model": Net, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "loss": loss, "data": points()}
    return base | changes


def solo(place: Path, **changes: Any) -> Trainer:
    """One device, six batches an epoch."""
    base = parts() | {"batch_size": 4, "devices": "cpu", "seed": 1, "run_directory": place / "run"}
    return Trainer(**(base | changes))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Long:
    """A data set that says that it is so long."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def of_three_samples() -> dict[str, Any]:
    return parts(data=points(3))


def of_no_sample() -> dict[str, Any]:
    return parts(data=[])


def of_a_stream() -> dict[str, Any]:
    return parts(data=Stream())


# ---- every field


class Uncomparable:
    """Raises whatever is asked of it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no ==")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __hash__ = None  # type: ignore[assignment]


STRANGE = (np.array([1, 2]), np.array([]), torch.zeros(2), object(), Uncomparable(), b"x", 1j, int, ..., {3})
ALL: dict[str, tuple[object, ...]] = BAD | {
    "devices": (0, -1, 3, [], True, None, 2.0, "gpu", "xpu", "tpu:0", ["cpu", 3], ["cuda:0", "cuda:1"], "emulated:1"),
    "entry": ("parts", ":build", "a b:c", 3, b"m:f"),
    "run_directory": ("", " ", 3, b"runs", "a\0b", "\ud800"),
    "replay": ("", 3, b"runs", "a\0b"),
    "checkpoint": (*BAD["checkpoint"], "\ud800"),
    "model": (5, "net", nn.Linear(1, 1)),
    "optimizer": (5, "sgd", torch.optim.LBFGS),
    "loss": (5, "mse", nn.MSELoss, nn.MSELoss()),
    "data": (5, "rows", {"a": 1}, iter([1]), [], Stream(), Long(-1), Long(2**80)),
    "evaluate": (5, "accuracy"),
    "eval_data": (5, "rows", [], Stream()),
    "scheduler": (5, "cosine"),
    "callbacks": (5, print, "on_batch"),
    "collate": (5, "stack"),
    "worker_init": (5, "seed"),
}
# A function, a dict or a list may be what is wanted there; only the values above are tried.
PARTS_OF_ANY_KIND = {
    "data",
    "eval_data",
    "model",
    "optimizer",
    "loss",
    "evaluate",
    "scheduler",
    "collate",
    "worker_init",
}


@pytest.mark.parametrize("field", ALL)
def test_a_wrong_value_is_refused_by_field_and_value_with_what_is_allowed(field: str) -> None:
    values = [*ALL[field], *(() if field in PARTS_OF_ANY_KIND else STRANGE)]
    base = parts(evaluate=len, eval_data=points()) | {"batch_size": 8, "devices": TWO}
    for value in [value for value in values if value is not None or field not in parts()]:
        given = {"batch_size": 8, "devices": TWO} if field == "entry" else base
        with pytest.raises(PlanError) as caught:
            Trainer(**{**given, field: value})
        first, second = str(caught.value).split("\n")
        assert caught.value.field.partition("[")[0] == field, first
        assert first.startswith(f"{caught.value.field} = "), first
        assert second.startswith("Allowed: "), second


def test_every_field_is_tried() -> None:
    named = [
        name
        for name, given in inspect.signature(Trainer.__init__).parameters.items()
        if given.kind.name != "VAR_KEYWORD"
    ]
    assert {*ALL} == {*setting_names(), *named} - {"self"}


# ---- refused before the first batch


def refusal(trainer: Callable[[], Trainer], batches: list[BatchInfo] | None = None) -> tuple[PlanError, str, str]:
    """The error and its two lines."""
    with pytest.raises(PlanError) as caught:
        trainer().run(quiet=True)
    assert not batches
    first, second = str(caught.value).split("\n")
    assert second.startswith("Allowed: ")
    return caught.value, first, second


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"devices": 0}, "devices", "a world size of 1 or more"),
        ({"devices": -1}, "devices", "a world size of 1 or more"),
        ({"entry": "of_three_samples", "devices": ["cpu"] * 5, "batch_size": 1}, "devices", "5 ranks are more than"),
        ({"entry": "of_three_samples", "devices": TWO}, "batch_size", "at most 3, the length of the data set"),
        ({"entry": "of_no_sample", "devices": TWO}, "data", "it is empty"),
        ({"entry": "of_a_stream", "devices": TWO}, "data", "it is iterable"),
        ({"data": []}, "data", "it is empty"),
        ({"data": points(1)}, "batch_size", "at most 1, the length of the data set"),
        ({"data": Stream()}, "data", "it is iterable"),
        ({"devices": "cuda:1"}, "devices", 'torch can use 1 GPU here Allowed: "cuda:0" or "cpu".'),
        ({"devices": "auto"}, "", ""),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], field: str, says: str
) -> None:
    monkeypatch.setattr(sources, "count_gpus", lambda: 1 if settings.get("devices") == "cuda:1" else 2)
    given = {**settings}
    if "entry" in given:
        given |= {"entry": f"{HERE}:{given['entry']}", **dict.fromkeys(parts())}
    error, first, second = refusal(lambda: solo(tmp_path, **given))
    assert error.field == (field or "devices")
    assert (says or "this machine has cuda:0, cuda:1, and several GPUs at once are not in") in f"{first} {second}"
    assert list(tmp_path.iterdir()) == []


def test_one_sample_is_trained(tmp_path: Path) -> None:
    result = solo(tmp_path, data=points(1), batch_size=1, epochs=3).run(quiet=True)
    assert [epoch["samples"] for epoch in result.metrics] == [1, 1, 1]


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def sharded() -> nn.Module:
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (nn.Identity, "it has no parameters"),
        (frozen, "every parameter is frozen"),
        (lambda: nn.LazyLinear(2), "weight, bias have no shape yet"),
        (lambda: nn.DataParallel(Net()), "the model is wrapped in DataParallel"),
        (lambda: nn.Sequential(nn.DataParallel(Net())), "0 is wrapped in DataParallel"),
        (lambda: nn.parallel.DistributedDataParallel(Net()), "the model is wrapped in DistributedDataParallel"),
        (lambda: FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), "wrapped in FullyShardedDataParallel"),
        (sharded, "the model is wrapped in FSDPModule"),
        (lambda: Net().to("meta"), "parameter line.weight is on the meta device"),
        (lambda: None, "that came back"),
    ],
    ids=["none", "frozen", "lazy", "DP", "inner DP", "DDP", "FSDP", "FSDP2", "meta", "nothing"],
)
@pytest.mark.filterwarnings("ignore")  # of the wrappers, about gloo and one process
def test_a_model_that_cannot_be_trained(
    tmp_path: Path, process_group: None, build: Callable[[], nn.Module], says: str
) -> None:
    batches: list[BatchInfo] = []
    error, first, _ = refusal(lambda: solo(tmp_path, model=build, callbacks=[batches.append]), batches)
    assert error.field == "model"
    assert says in first


@pytest.mark.parametrize(
    "scheduler",
    [
        lr_scheduler.ReduceLROnPlateau,
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5),
    ],
    ids=["class", "factory"],
)
def test_a_scheduler_driven_by_a_metric(tmp_path: Path, scheduler: Any) -> None:
    error, first, _ = refusal(lambda: solo(tmp_path, scheduler=scheduler))
    assert error.field == "scheduler"
    assert "it is driven by a metric" in first


def test_a_loss_that_does_not_depend_on_the_model(tmp_path: Path) -> None:
    batches: list[BatchInfo] = []
    constant = lambda model, batch: batch[0].mean()  # noqa: E731
    _, first, _ = refusal(lambda: solo(tmp_path, loss=constant, callbacks=[batches.append]), batches)
    assert "it has no gradient" in first


# ---- odd, and works


COUNTED = ("float16", "bfloat16", "float32", "float64", "int8", "int64")


class Odd(Net):
    """Tied, 0-dim, empty and strided parameters, frozen ones of other kinds, buffers of all kinds that are replaced."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.tied = nn.Linear(3, 2, dtype=dtype)
        self.tied.weight = self.line.weight
        self.lazy = nn.LazyLinear(2, dtype=dtype)
        self.lazy(torch.zeros(1, 3, dtype=dtype))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.strided = nn.Parameter(torch.zeros(4, 3, dtype=dtype).t())
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        for name in COUNTED:
            self.register_buffer(f"{name}_count", torch.zeros(2, dtype=getattr(torch, name)))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("limit", torch.full((2,), -math.inf))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in [*(f"{name}_count" for name in COUNTED), "unsaved"]:
            setattr(self, name, getattr(self, name) + 1)
        self.seen = ~self.seen | True
        x = x.to(self.scale.dtype)
        rest = self.strided.mean() + self.empty.sum()
        return (self.line(x) + self.tied(x) + self.lazy(x)).float() * self.scale.float() + rest.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_odd_tensors_are_trained_saved_and_read_again(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "c"
    settings = {"model": lambda: Odd(dtype), "checkpoint": folder, "resume": "auto"}
    solo(tmp_path, **settings).run(quiet=True)
    result = solo(tmp_path, **settings, epochs=2, run_directory=tmp_path / "again").run(quiet=True)
    model: Any = result.model
    assert result.degraded == []
    assert result.metrics[1]["loss"] < result.metrics[0]["loss"]
    assert model.line.weight is model.tied.weight
    assert (model.scale.dtype, model.empty.shape, model.strided.shape) == (dtype, (0, 3), (3, 4))
    assert (model.whole.tolist(), model.flags.tolist()) == ([0, 1, 2], [True, False])
    counts = [getattr(model, f"{name}_count") for name in COUNTED]
    assert [(count.tolist(), str(count.dtype)) for count in counts] == [([12] * 2, f"torch.{name}") for name in COUNTED]
    assert model.seen.tolist() == [True] * 2
    assert (model.limit.tolist(), model.unsaved.item()) == ([-math.inf] * 2, 12.0)


# ---- fails while it trains, alone: nothing is lost


class Broken:
    """Raises, or ends its loader process, at one item."""

    def __init__(self, item: int, ends_loader: bool = False) -> None:
        self._item = item
        self._ends_loader = ends_loader

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self._item:
            if self._ends_loader and get_worker_info() is not None:
                raise SystemExit(7)
            raise ValueError("torn")
        return torch.ones(3), torch.ones(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_raises_is_named_and_what_was_trained_is_kept(tmp_path: Path, workers: int) -> None:
    trained: list[BatchInfo] = []
    with pytest.raises(RunFailed) as caught:
        solo(tmp_path, data=Broken(77), loader={"workers": workers}, callbacks=[trained.append]).run(quiet=True)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "data[77] raised ValueError: torn",
        "Every item from 0 to len(data) - 1 must be readable.",
    ]
    assert trained
    assert not torch.equal(load_file(tmp_path / "run" / CONSENSUS)["line.weight"], Net().line.weight)


def test_a_loader_process_that_ends_is_named(tmp_path: Path) -> None:
    data = Broken(77, ends_loader=True)
    with pytest.raises(
        RunFailed, match=r"^loader process loader-\d \(pid \d+\) ended with exit code 7\nIts own message"
    ):
        solo(tmp_path, data=data, loader={"workers": 2}).run(quiet=True)
    assert (tmp_path / "run" / CONSENSUS).exists()


class Once:
    """A loss that is NaN in one batch."""

    def __init__(self, batch: int) -> None:
        self._left = batch

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._left -= 1
        return loss(model, batch) * (math.nan if self._left == 0 else 1.0)


def test_what_is_not_finite_is_said_and_replaces_no_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = solo(tmp_path, loss=Once(8), epochs=3, checkpoint=tmp_path / "c", checkpoint_keep=1).run(quiet=True)
    assert result.degraded == [
        "the loss of batch 1 of epoch 1 is nan",
        "no checkpoint after epoch 1: line.weight is not finite; the earlier ones are kept",
        "no checkpoint after epoch 2: line.weight is not finite; the earlier ones are kept",
    ]
    assert capfd.readouterr().err.splitlines() == [f"flodl: {words}" for words in result.degraded]
    ((number, path),) = find_checkpoints(tmp_path / "c")
    assert (number, bool(load_file(path / CONSENSUS)["line.weight"].isfinite().all())) == (1, True)
    stored = (tmp_path / "run" / "result.json").read_text()
    assert [epoch["loss"] is None for epoch in json.loads(stored)["epochs"]] == [False, True, True]
    assert "NaN" not in stored


# ---- checkpoints


def checkpoints(place: Path) -> Path:
    """Three whole ones: of one, two and three epochs."""
    solo(place, epochs=3, checkpoint=place / "c", run_directory=place / "first").run(quiet=True)
    return place / "c"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "removed"])
@pytest.mark.parametrize("name", ["checkpoint.json", CONSENSUS, "rank-0.safetensors"])
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(
    tmp_path: Path, harm: Callable[[Path], None], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints(tmp_path)
    harm(folder / "round-000003" / name)
    result = solo(tmp_path, epochs=3, checkpoint=folder, resume="auto").run(quiet=True)
    assert (result.resumed_from or {})["round"] == 2
    assert result.raw["samples"] == SAMPLES
    (said,) = result.degraded
    assert said.startswith(f"a checkpoint is passed over: {folder / 'round-000003' / name} ")
    assert said in capfd.readouterr().err
    same, again = load_file(tmp_path / "first" / CONSENSUS), load_file(tmp_path / "run" / CONSENSUS)
    assert all(torch.equal(same[key], again[key]) for key in same)


def test_a_checkpoint_that_must_be_whole_and_is_not(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path)
    for path in sorted(folder.glob("round-*")):
        flip(path / CONSENSUS)
    for resume in (True, "auto", folder, folder / "round-000002"):
        settings = {"checkpoint": folder} if resume in (True, "auto") else {}
        with pytest.raises(CheckpointError, match=r"consensus\.safetensors was altered"):
            solo(tmp_path, epochs=4, resume=resume, **settings).run(quiet=True)
    shutil.rmtree(folder)
    with pytest.raises(
        CheckpointError, match=r"^there is no checkpoint in .*\nGive the folder of a checkpoint, or resume"
    ):
        solo(tmp_path, checkpoint=folder, resume=True).run(quiet=True)
    assert not (tmp_path / "run").exists()


def deep(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(14)), nn.Linear(width, 2))


def test_a_checkpoint_of_another_model_names_at_most_twenty_tensors(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": tmp_path / "c", "resume": "auto"}
    solo(tmp_path, model=lambda: deep(3), run_directory=tmp_path / "first", **settings).run(quiet=True)
    batches: list[BatchInfo] = []
    with pytest.raises(CheckpointError) as caught:
        solo(tmp_path, model=lambda: deep(5), epochs=2, callbacks=[batches.append], **settings).run(quiet=True)
    first, second = str(caught.value).split("\n")
    assert f"the checkpoint does not fit: {tmp_path / 'c' / 'round-000001'}: tensor 0.weight has shape [5, 3]" in first
    assert (first.count("has shape"), first.endswith("and 11 more")) == (20, True)
    assert second.startswith("Resume with the model")
    assert batches == []


def test_a_folder_that_holds_something_needs_resume_or_overwrite(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    error, first, second = refusal(lambda: solo(tmp_path, checkpoint=folder))
    assert (error.field, first.endswith("the folder is not empty")) == ("checkpoint", True)
    assert 'resume="auto"' in second
    assert "overwrite=True" in second
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept


@pytest.mark.parametrize("field", ["run_directory", "checkpoint"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "within", Path("/proc/flodl/within")):
        error, first, _ = refusal(lambda place=place: solo(tmp_path, **{field: place}))  # type: ignore[misc]
        assert error.field == field
        assert first.startswith(f"{field} = '{place}': ")


def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    def call_again(batch: BatchInfo) -> None:
        try:
            solo(tmp_path, run_directory=tmp_path / "inner").run()
        except PlanError as error:
            said.append(str(error).partition("\n")[0])

    solo(tmp_path, callbacks=[call_again]).run(quiet=True)
    assert said == ["run() was called while another run() of this process is at work"] * 6
    assert not (tmp_path / "inner").exists()
