"""The cpu plane against a real host memory: what seals, what is adopted, and that nothing is lost on the way."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from flodl.averaging.consensus import save_consensus
from flodl.averaging.cpu import RANK_PAGE_BYTES, Blend, CpuPlane, HostMemories
from flodl.averaging.layout import build_layout
from flodl.errors import CheckpointError, RunFailed
from flodl.native import Endpoint, EventKind, HostMemory, Section, SharedMemory
from flodl.protocol.messages import LayoutSpec

DELTA = Blend()


class Host:
    """One host's memory, its ranks and its rounds."""

    def __init__(self, endpoint: Endpoint, spec: LayoutSpec) -> None:
        self._endpoint = endpoint
        sections = [Section(s.rule, s.dtype, s.offset, s.count, s.mean_offset) for s in spec.sections]
        self._memory = HostMemory(spec.bytes, sections, "none", 1.0, 0.0, 2, endpoint)
        self._ranks: list[int] = []
        self._task = 0

    def admit(self, model: nn.Module, blend: Blend | None = None) -> CpuPlane:
        rank = self._memory.open_rank()
        self._ranks.append(rank)
        buffers = [SharedMemory.adopt(self._memory.buffer_descriptor(index), False) for index in (0, 1)]
        own = SharedMemory.adopt(self._memory.rank_descriptor(rank), True)
        return CpuPlane(build_layout(model), HostMemories(own, (buffers[0], buffers[1])), blend)

    def round(self, *weights: float) -> tuple[int, int]:
        """Averages what the ranks sealed, in their order. Returns (buffer, hash) of the commit."""
        contributions = [(rank, weight, weight) for rank, weight in zip(self._ranks, weights, strict=False)]
        self._memory.start_reduce(self._next(), contributions)
        self._wait()
        self._memory.start_commit(self._next(), True)
        self._wait()
        return self._memory.committed(), self._memory.commit_result().hash

    def _next(self) -> int:
        self._task += 1
        return self._task

    def _wait(self) -> None:
        for _ in range(1000):
            for event in self._endpoint.wait(10.0):
                if event.kind == EventKind.task_done and event.id == self._task:
                    assert event.reason == ""
                    return
        raise AssertionError("the task did not end")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


class Mixed(nn.Module):
    """Tied, 0-dim, empty, turned and channels-last parameters, four dtypes, a normalisation, over 1 MiB."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 300_000 // 7)
        self.head = nn.Linear(300_000 // 7, 7, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.randn(9).to(torch.bfloat16))
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).mean() * self.scale + self.turned.sum() + self.exact.sum().float()
        return y + self.coarse.float().sum() + self.head.weight[:, :3].sum()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def small(value: float = 0.0) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("blend", [None, DELTA], ids=["waiting", "async"])
def test_moving_into_the_arena_changes_no_value_and_ties_stay_tied(endpoint: Endpoint, blend: Blend | None) -> None:
    model = Mixed()
    before = state(model)
    Host(endpoint, build_layout(model).spec).admit(model, blend)
    assert_same(model, before)
    assert model.head.weight is model.embed.weight
    model(torch.randn(2, 3, 8, 8)).backward()


@pytest.mark.parametrize("blend", [None, DELTA], ids=["waiting", "async"])
def test_the_hash_of_what_a_rank_read_is_the_hosts_own(endpoint: Endpoint, blend: Blend | None) -> None:
    first, second = Mixed(1), Mixed(2)
    host = Host(endpoint, build_layout(first).spec)
    planes = [host.admit(first, blend), host.admit(second, blend)]
    for plane in planes:
        plane.seal()
    buffer, committed = host.round(0.25, 0.75)
    assert [plane.adopt(buffer) for plane in planes] == [committed, committed]
    second.fixed.data.copy_(first.fixed)  # frozen: it does not travel
    assert_same(first, state(second))


def test_parameters_buffers_variances_and_counts_are_averaged_by_their_rules(endpoint: Endpoint) -> None:
    models = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    for k, model in enumerate(models):
        model(torch.randn(16, 3, generator=torch.Generator().manual_seed(k)) * (k + 1) + k)
        nn.init.constant_(model.weight, k + 1.0)
    models[1](torch.randn(16, 3))
    p = torch.tensor([0.25, 0.75])
    means = torch.stack([model.running_mean.clone() for model in models])
    variances = torch.stack([model.running_var.clone() for model in models])
    host = Host(endpoint, build_layout(models[0]).spec)
    planes = [host.admit(model) for model in models]
    for plane in planes:
        plane.seal()
    buffer, _ = host.round(0.25, 0.75)
    planes[0].adopt(buffer)
    mean = (p[:, None] * means).sum(0)
    assert models[0].weight.tolist() == [1.75] * 3
    torch.testing.assert_close(models[0].running_mean, mean)
    torch.testing.assert_close(models[0].running_var, (p[:, None] * (variances + means**2)).sum(0) - mean**2)
    assert int(models[0].num_batches_tracked) == 2


def test_an_optimizer_made_before_trains_in_the_arena_and_sealing_copies_nothing(endpoint: Endpoint) -> None:
    model = small(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    host = Host(endpoint, build_layout(model).spec)
    plane = host.admit(model)
    train(model, optimizer)
    trained = state(model)
    plane.seal()
    with torch.no_grad():
        model.weight.fill_(0.0)  # after the seal, in the very memory that the host reads
    buffer, _ = host.round(1.0)
    plane.adopt(buffer)
    assert model.weight.abs().sum() == 0.0
    assert torch.equal(model.bias, trained["bias"])
    train(model, optimizer)
    assert model.bias.abs().sum() > 0.0


def test_an_async_snapshot_stands_still_while_training_goes_on(endpoint: Endpoint) -> None:
    model = small(1.0)
    host = Host(endpoint, build_layout(model).spec)
    plane = host.admit(model, DELTA)
    plane.seal()
    with torch.no_grad():
        model.weight.fill_(5.0)
    buffer, _ = host.round(1.0)
    plane.adopt(buffer, overwrite=True)
    assert model.weight.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("blend", "weight"),
    [(DELTA, 3.0 + 0.5), (Blend("elastic", 0.25), 0.75 * 2.5 + 0.25 * 3.0), (Blend("adopt"), 3.0)],
    ids=["delta", "elastic", "adopt"],
)
def test_steps_made_meanwhile_are_blended_and_buffers_take_the_consensus(
    endpoint: Endpoint, blend: Blend, weight: float
) -> None:
    mine, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    host = Host(endpoint, build_layout(mine).spec)
    planes = [host.admit(mine, blend), host.admit(other, blend)]
    for model, value in ((mine, 2.0), (other, 4.0)):
        nn.init.constant_(model.weight, value)
        model.running_mean.fill_(value)
    for plane in planes:
        plane.seal()
    nn.init.constant_(mine.weight, 2.5)
    mine.running_mean.fill_(99.0)
    buffer, committed = host.round(0.5, 0.5)
    assert planes[0].adopt(buffer) == committed
    assert planes[0].keeps_steps == (blend.rule == "delta")
    assert mine.weight.tolist() == [weight] * 3
    assert mine.running_mean.tolist() == [3.0] * 3


def test_delta_without_steps_is_the_consensus_bit_for_bit(endpoint: Endpoint) -> None:
    first, second = Mixed(1), Mixed(2)
    host = Host(endpoint, build_layout(first).spec)
    planes = [host.admit(first, DELTA), host.admit(second, DELTA)]
    for plane in planes:
        plane.seal()
    buffer, _ = host.round(0.3, 0.7)
    planes[0].adopt(buffer)
    planes[1].adopt(buffer, overwrite=True)
    second.fixed.data.copy_(first.fixed)
    assert_same(first, state(second))


def test_a_joiner_without_a_snapshot_takes_the_consensus_exactly(endpoint: Endpoint) -> None:
    old, joiner = small(2.0), small(7.0)
    host = Host(endpoint, build_layout(old).spec)
    plane = host.admit(old, DELTA)
    plane.seal()
    buffer, committed = host.round(1.0)
    assert host.admit(joiner, DELTA).adopt(buffer) == committed
    assert_same(joiner, state(old))


def test_a_rebound_buffer_is_found_by_name_without_a_word(endpoint: Endpoint) -> None:
    model = small()
    model.register_buffer("seen", torch.zeros(2))
    host = Host(endpoint, build_layout(model).spec)
    plane = host.admit(model)
    model.seen = model.seen + 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plane.seal()
    buffer, _ = host.round(1.0)
    model.seen = model.seen + 1.0
    plane.adopt(buffer)
    assert model.seen.tolist() == [3.0, 3.0]
    model.seen += 1.0  # in place again: still what the host reads
    plane.seal()
    buffer, _ = host.round(1.0)
    plane.adopt(buffer)
    assert model.seen.tolist() == [4.0, 4.0]


def test_a_parameter_that_left_is_brought_back_with_one_warning(endpoint: Endpoint) -> None:
    model = small(1.0)
    host = Host(endpoint, build_layout(model).spec)
    plane = host.admit(model)
    model.weight.data = torch.full((2, 3), 8.0)
    with pytest.warns(RuntimeWarning, match="weight left its shared memory"):
        plane.seal()
    buffer, _ = host.round(1.0)
    model.weight.data = torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plane.adopt(buffer)
    assert model.weight.tolist() == [[8.0] * 3] * 2


def test_assigned_state_trains_on_under_the_optimizer_that_was_made(endpoint: Endpoint) -> None:
    model = small(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plane = Host(endpoint, build_layout(model).spec).admit(model)
    model.load_state_dict({"weight": torch.full((2, 3), 4.0), "bias": torch.ones(2)}, assign=True)
    with pytest.warns(RuntimeWarning):
        plane.seal()
    assert model.weight.tolist() == [[4.0] * 3] * 2
    train(model, optimizer)
    assert model.weight.tolist() != [[4.0] * 3] * 2


def test_a_tensor_that_changed_its_kind_is_an_error_by_name(endpoint: Endpoint) -> None:
    model = small()
    model.register_buffer("seen", torch.zeros(2))
    plane = Host(endpoint, build_layout(model).spec).admit(model)
    model.seen = torch.zeros(3)
    with pytest.raises(RunFailed, match=r"seen changed from torch.float32 \[2\] on cpu to torch.float32 \[3\]"):
        plane.seal()
    model.seen = None
    with pytest.raises(RunFailed, match="seen was removed"):
        plane.adopt(0)


@pytest.mark.parametrize("blend", [None, DELTA], ids=["waiting", "async"])
def test_evaluation_shows_the_consensus_and_puts_everything_back(endpoint: Endpoint, blend: Blend | None) -> None:
    mine, other = Mixed(1), Mixed(2)
    host = Host(endpoint, build_layout(mine).spec)
    planes = [host.admit(mine, blend), host.admit(other, blend)]
    for plane in planes:
        plane.seal()
    with torch.no_grad():
        mine.scale.add_(1.0)
    buffer, _ = host.round(0.5, 0.5)
    for plane in planes:
        plane.adopt(buffer)
    before = state(mine)
    with planes[0].showing(buffer):
        assert torch.equal(mine.scale, other.scale)
        with torch.no_grad():
            mine.scale.fill_(0.0)
        mine.norm.running_mean = torch.ones(4)
    assert_same(mine, before)
    assert bool(blend) != torch.equal(mine.scale, other.scale)


def test_gaps_of_the_arena_are_zero(endpoint: Endpoint) -> None:
    model = small(3.0)
    spec = build_layout(model).spec
    plane = Host(endpoint, spec).admit(model, DELTA)
    plane.seal()
    words = plane._memories.rank.read(RANK_PAGE_BYTES, spec.bytes)
    filled = sum(4 * p.numel() for p in model.parameters())
    assert sum(byte != 0 for byte in words) == filled // 2  # 3.0 is 00 00 40 40


def test_the_state_is_saved_whole_under_its_names_and_tied_tensors_once(tmp_path: Path) -> None:
    path = tmp_path / "consensus.safetensors"
    model = Mixed(1)
    save_consensus(model, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    expected = state(model)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}
        names = set(file.keys())
        assert names == expected.keys() - {"head.weight"}
        assert all(torch.equal(file.get_tensor(name), expected[name]) for name in names)


def test_a_state_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_consensus(nn.Linear(1, 1), tmp_path / "missing" / "c")
