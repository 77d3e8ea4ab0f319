"""When a rank keeps, saves and restores: always as of the seal, before it adopts and before it trains on."""

from __future__ import annotations

from typing import Any

import pytest

from flodl.errors import WireError
from flodl.protocol.messages import (
    Adopted,
    Commit,
    Paused,
    Restore,
    Resumed,
    Saved,
    Sealed,
    Seed,
    Stop,
    Window,
)
from flodl.rank.loop import RankLoop
from tests.unit.test_loop import World, batches, on


class Disk:
    """Notes what it is asked for in the world's diary; a state is the number of steps made so far."""

    def __init__(self, world: World) -> None:
        self.world = world

    def keep(self) -> int:
        self.world.diary.append(f"keep {self.world.steps}")
        return self.world.steps

    def save(self, commit: Commit, kept: Any) -> list[Saved]:
        state = "now" if kept is None else f"as of {kept}"
        self.world.diary.append(f"save {commit.round} {state}{' theta' if commit.saves_consensus else ''}")
        self.world.now += 3.0
        return [Saved(commit.round, "rank-0.safetensors", "00", 9)]

    def restore_state(self, path: str) -> None:
        self.world.diary.append(f"restore state of {path}")

    def restore_consensus(self, path: str) -> None:
        self.world.diary.append(f"restore theta of {path}")


def run(world: World) -> list[Any]:
    RankLoop(world, world, world, clock=lambda: world.now, saving=Disk(world)).run()
    return [entry for entry in world.diary if entry not in ("Paused", "Resumed")]


def test_a_waiting_rank_saves_before_it_adopts() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2), batches(0, 9)))
    world.answers.append(on(Sealed, Commit(1, 1, 0, Window(2, 1), save="/c", saves_consensus=True), Stop("done")))
    diary = run(world)
    at = diary.index("save 1 now theta")
    assert diary[at - 2 : at + 4] == ["seal", "Sealed", "save 1 now theta", "Saved", "adopt 1", "Adopted"]
    assert Resumed("checkpoint", 3.0) in world.said
    assert world.said.index(Paused("checkpoint")) < world.said.index(Saved(1, "rank-0.safetensors", "00", 9))


def test_an_async_rank_saves_what_it_kept_at_the_seal_though_it_has_trained_on() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=2, saves=True), batches(0, 9)), keeps_steps=True)
    world.at_step[3] = [Commit(1, 1, 0, Window(2, 3), save="/c")]
    world.answers.append(lambda message: [Stop("done")] if isinstance(message, Sealed) and message.round == 2 else [])
    diary = run(world)
    assert diary.index("keep 1") > diary.index("seal")
    assert diary.index("save 1 as of 1") > diary.index((0, 2))
    assert sum(str(entry).startswith("keep") for entry in diary) == 1


def test_what_was_kept_for_a_round_that_is_not_saved_is_dropped() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, saves=True), batches(0, 9)))
    world.answers.append(on(Sealed, Commit(1, 1, 0, Window(2, 1)), Commit(2, 0, 0, None, save="/c"), Stop("done")))
    world.answers.append(lambda message: [Stop("done")] if message == Adopted(2, 2, 1000) else [])
    assert "save 2 now" in run(world)


def test_two_commits_before_one_boundary_save_the_first_and_adopt_the_second() -> None:
    world = World(Commit(1, 1, 0, None, save="/c"), Commit(2, 0, 0, None))
    world.answers.append(lambda message: [Stop("done")] if isinstance(message, Adopted) else [])
    diary = run(world)
    assert diary[:4] == ["save 1 now", "Saved", "adopt 0", "Adopted"]


def test_a_rank_that_is_left_out_forgets_before_it_saves() -> None:
    world = World(Commit(1, 1, 0, None, excluded=True, save="/c"))
    world.answers.append(lambda message: [Stop("done")] if isinstance(message, Adopted) else [])
    diary = run(world)
    assert diary[:3] == ["forget", "save 1 now", "Saved"]


def test_a_checkpoint_is_restored_before_the_seal_of_round_0() -> None:
    world = World(Restore("/c", consensus=True), Restore("/c"), Seed(), Stop("done"))
    assert run(world)[:4] == ["restore theta of /c", "restore state of /c", "seal", "Sealed"]


def test_a_rank_without_checkpoints_says_that_it_has_none() -> None:
    world = World(Commit(1, 1, 0, None, save="/c"))
    with pytest.raises(WireError, match="spoke of checkpoints"):
        RankLoop(world, world, world, clock=lambda: world.now).run()
