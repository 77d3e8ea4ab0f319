"""A rank's part in a checkpoint: what it writes, and what it begins with where it had none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from flodl.averaging.layout import build_layout
from flodl.checkpoint.document import CONSENSUS, FORMAT, Document, RankRecord, optimizer_file, write_document
from flodl.checkpoint.files import FileDigest, digest_file
from flodl.errors import CheckpointError
from flodl.plan import build_plan, plan_to_dict
from flodl.protocol.messages import Commit, DataSpec
from flodl.rank.leases import Lease, Leases
from flodl.rank.parts import Parts
from flodl.rank.saving import Saving, load_tensors, restore_optimizer
from flodl.rank.trainee import Trainee

PLAN = build_plan(mode="cpu-cadence", devices=["cpu"] * 3, batch_size=4, epochs=1, seed=2)


def trainee(rank: int, optimizer: Any = torch.optim.Adam) -> Trainee:
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 3, generator=draw), torch.randn(40, 1, generator=draw))
    given = Parts(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        optimizer=lambda p: optimizer(p, lr=0.01),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=data,
    )
    return Trainee(PLAN, given, rank)


def train(made: Trainee, first: int, count: int) -> None:
    for index in range(first, first + count):
        made.train(Lease(0, index), Leases())


def moments(made: Trainee) -> list[torch.Tensor]:
    return [values["exp_avg"].clone() for values in made.optimizer.torch.state.values()]


def saved(path: Path, batches: tuple[int, ...]) -> list[Trainee]:
    """A checkpoint of so many ranks, each having trained as many batches as told."""
    path.mkdir()
    made = [trainee(rank) for rank in range(len(batches))]
    files = []
    for rank, count in enumerate(batches):
        train(made[rank], 4 * rank, count)
        saving = Saving(made[rank], build_layout(made[rank].model).spec, lambda buffer, at, size: bytes(size))
        (answer,) = saving.save(Commit(9, 0, 0, save=str(path)), None)
        assert (answer.round, answer.path, answer.error) == (9, optimizer_file(rank), "")
        assert digest_file(path / answer.path) == FileDigest(answer.path, answer.digest, answer.size)
        files.append(FileDigest(answer.path, answer.digest, answer.size))
    document = Document(
        format=FORMAT,
        run="a",
        round=9,
        plan=plan_to_dict(PLAN),
        layout=build_layout(made[0].model).spec,
        data=DataSpec(40, ""),
        world_size=len(batches),
        contributed=(),
        quarantined=(),
        epochs=(),
        anchor=1,
        ranks=tuple(RankRecord(rank, "cpu", count) for rank, count in enumerate(batches)),
        files=tuple(files),
    )
    write_document(path, document)
    return made


def test_a_rank_takes_its_own_part_and_one_that_had_none_the_weighted_mean(tmp_path: Path) -> None:
    earlier = saved(tmp_path / "c", (3, 1))
    second, third = trainee(1), trainee(2)
    restore_optimizer(second, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(moments(second), moments(earlier[1]), strict=True))
    restore_optimizer(third, tmp_path / "c")
    for found, a, b in zip(moments(third), moments(earlier[0]), moments(earlier[1]), strict=True):
        torch.testing.assert_close(found, 0.75 * a + 0.25 * b)
    assert {float(values["step"]) for values in third.optimizer.torch.state.values()} == {3.0}


def test_what_was_kept_is_written_whatever_was_trained_since(tmp_path: Path) -> None:
    made = trainee(0)
    saving = Saving(made, build_layout(made.model).spec, lambda buffer, at, size: bytes(size))
    train(made, 0, 1)
    kept = saving.keep()
    expected = moments(made)
    train(made, 1, 3)
    saving.save(Commit(1, 0, 0, save=str(tmp_path)), kept)
    written = load_file(tmp_path / optimizer_file(0))
    assert all(torch.equal(a, written[f"{n}/exp_avg"]) for a, n in zip(expected, names(made), strict=True))
    assert float(written["0.weight/step"]) == 1.0


def names(made: Trainee) -> list[str]:
    return [name for name, _ in made.model.named_parameters()]


def test_the_consensus_is_what_the_host_holds_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    made = trainee(0)
    layout = build_layout(made.model).spec
    theta = torch.rand(layout.bytes // 4, generator=torch.Generator().manual_seed(4)).numpy().tobytes()
    asked: list[int] = []

    def read(buffer: int, at: int, size: int) -> bytes:
        asked.append(buffer)
        return theta[at : at + size]

    saving = Saving(made, layout, read)
    answers = saving.save(Commit(5, 1, 0xAB, save=str(tmp_path), saves_consensus=True), None)
    assert [answer.path for answer in answers] == [CONSENSUS, optimizer_file(0)]
    assert set(asked) == {1}
    saving.restore_consensus(str(tmp_path))
    state = dict(made.model.state_dict())
    for tensor in layout.tensors:
        raw = state[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw == theta[tensor.offset : tensor.offset + len(raw)], tensor.name


def test_a_part_that_cannot_be_written_is_answered_and_not_raised(tmp_path: Path) -> None:
    made = trainee(0)
    saving = Saving(made, build_layout(made.model).spec, lambda buffer, at, size: bytes(size))
    (tmp_path / "file").write_text("")
    answers = saving.save(Commit(5, 1, 0, save=str(tmp_path / "file" / "c"), saves_consensus=True), None)
    assert [answer.path for answer in answers] == [CONSENSUS, optimizer_file(0)]
    assert all(answer.error.endswith("Not a directory") for answer in answers)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    made = trainee(0)
    saving = Saving(made, build_layout(made.model).spec, lambda buffer, at, size: bytes(size))
    saving.save(Commit(5, 1, 0, save=str(tmp_path), saves_consensus=True), None)
    with pytest.raises(CheckpointError, match=r"holds another 0\.weight"):
        load_tensors(nn.Sequential(nn.Linear(3, 5)), tmp_path / CONSENSUS, {"0.weight"})
    with pytest.raises(CheckpointError, match="holds no tensor nowhere"):
        load_tensors(made.model, tmp_path / CONSENSUS, {"nowhere"})


def test_parts_of_different_optimizers_begin_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "c", (1, 1))
    other = trainee(1, torch.optim.AdamW)
    train(other, 0, 1)
    saving = Saving(other, build_layout(other.model).spec, lambda buffer, at, size: bytes(size))
    (answer,) = saving.save(Commit(9, 0, 0, save=str(tmp_path / "c")), None)
    assert msgspec.structs.asdict(answer)["error"] == ""
    third = trainee(2)
    restore_optimizer(third, tmp_path / "c")
    assert not third.optimizer.torch.state
    assert "this rank's optimizer begins anew" in capfd.readouterr().err
