"""The rank's loop against a scripted controller and a plane of numbers: which order, and what is said."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flodl.errors import WireError
from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    Continue,
    Evaluated,
    FromRank,
    Grant,
    Leaving,
    Paused,
    Progress,
    Recall,
    Recalled,
    Resumed,
    Sealed,
    SealNow,
    Seed,
    Stop,
    ToRank,
    Welcome,
    Window,
)
from flodl.rank.leases import Lease, Leases
from flodl.rank.loop import RankLoop
from flodl.rank.tally import Trained

Answer = Callable[[FromRank], list[ToRank]]


class World:
    """Controller, plane and work in one. `answers` reply to what the rank says; `diary` holds what it did, in order."""

    def __init__(self, *first: ToRank, keeps_steps: bool = False) -> None:
        self.inbox: deque[ToRank] = deque(first)
        self.answers: list[Answer] = []
        self.at_step: dict[int, list[ToRank]] = {}
        self.diary: list[Any] = []
        self.said: list[FromRank] = []
        self.keeps_steps = keeps_steps
        self.steps = 0
        self.now = 0.0
        self.followed: list[Lease] = []

    # the line
    def receive(self, wait: bool) -> list[ToRank]:
        if wait and not self.inbox:
            raise AssertionError(f"the rank would wait for ever; it did {self.diary}")
        arrived = list(self.inbox)
        self.inbox.clear()
        return arrived

    def send(self, message: FromRank) -> None:
        self.said.append(message)
        if not isinstance(message, Progress):
            self.diary.append(type(message).__name__)
        for answer in self.answers:
            self.inbox.extend(answer(message))

    # the plane
    def seal(self) -> None:
        self.diary.append("seal")

    def adopt(self, buffer: int, overwrite: bool) -> int:
        self.diary.append(f"adopt {buffer}{' over' if overwrite else ''}")
        return 1000 + buffer

    @contextmanager
    def showing(self, buffer: int) -> Iterator[None]:
        self.diary.append(f"show {buffer}")
        yield
        self.diary.append("hide")

    # the work
    def follow(self, upcoming: Leases) -> None:
        self.followed = list(upcoming)

    def train(self, lease: Lease, upcoming: Leases) -> Trained:
        self.diary.append((lease.epoch, lease.index))
        self.steps += 1
        self.now += 0.01
        self.inbox.extend(self.at_step.get(self.steps, ()))
        return Trained(float(self.steps), 8, 10.0, 1.0, is_over_pad=self.steps % 2 == 0, factor=0.5)

    def forget(self) -> None:
        self.diary.append("forget")

    def evaluate(self, epoch: int) -> dict[str, float]:
        self.diary.append(f"evaluate {epoch}")
        self.now += 2.0
        return {"accuracy": 0.5}

    def run(self) -> RankLoop:
        loop = RankLoop(self, self, self, clock=lambda: self.now)
        loop.run()
        return loop

    def only(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def on(kind: type, *replies: ToRank) -> Answer:
    """The n-th message of this kind is answered with the n-th reply."""
    waiting = deque(replies)
    return lambda message: [waiting.popleft()] if isinstance(message, kind) and waiting else []


def batches(first: int, count: int, epoch: int = 0) -> tuple[BatchRange, ...]:
    return (BatchRange(epoch, first, count),)


def test_the_seeding_rank_seals_adopts_trains_its_window_seals_and_leaves() -> None:
    world = World(Seed())
    world.answers.append(on(Sealed, Commit(0, 1, 7, Window(1, 2), batches(0, 2)), Commit(1, 0, 8, None), Stop("done")))
    world.answers.append(lambda message: [Stop("done")] if message == Adopted(1, 2, 1000) else [])
    world.run()
    assert world.diary == [
        "seal",
        "Sealed",
        "adopt 1",
        "Adopted",
        "Paused",
        (0, 0),
        "Resumed",
        (0, 1),
        "seal",
        "Sealed",
        "adopt 0",
        "Adopted",
        "Leaving",
    ]
    assert world.said[-1] == Leaving(2)


def test_a_window_report_keeps_the_first_batch_apart_and_losses_by_epoch() -> None:
    world = World(Commit(0, 0, 0, Window(1, 3), (BatchRange(0, 9, 1), BatchRange(1, 0, 2))))
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    (sealed,) = world.only(Sealed)
    assert (sealed.round, sealed.step, sealed.batches, sealed.samples, sealed.factor) == (1, 3, 3, 24, 0.5)
    report = sealed.report
    assert (report.batches, report.compute_ms, report.data_ms, report.first_ms) == (2, 20.0, 2.0, 11.0)
    assert report.raw_over_pad == 1
    assert sealed.losses == ((0, 8.0, 8), (1, 40.0, 16))


def test_a_waiting_rank_trains_nothing_between_seal_and_commit() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2), batches(0, 9)))
    world.answers.append(on(Sealed, Commit(1, 1, 0, Window(2, 1)), Stop("done")))
    world.run()
    steps = [entry for entry in world.diary if isinstance(entry, tuple) or entry in ("seal", "adopt 1")]
    assert steps == [(0, 0), (0, 1), "seal", "adopt 1", (0, 2), "seal"]


def test_an_async_rank_trains_ahead_as_far_as_it_may_and_those_batches_count_in_the_next_window() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=2), batches(0, 9)), keeps_steps=True)
    world.at_step[3] = [Commit(1, 1, 0, Window(2, 3))]
    world.answers.append(lambda message: [Stop("done")] if isinstance(message, Sealed) and message.round == 2 else [])
    world.run()
    assert [entry for entry in world.diary if entry == "seal" or isinstance(entry, tuple)] == [
        (0, 0),
        "seal",
        (0, 1),
        (0, 2),
        (0, 3),
        "seal",
    ]
    assert world.only(Adopted)[1] == Adopted(1, 3, 1001, kept_steps=2)
    assert world.only(Sealed)[1].batches == 3


def test_running_ahead_ends_where_it_may_go_no_further() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=2), batches(0, 9)))
    with pytest.raises(AssertionError, match="would wait for ever"):
        world.run()
    assert world.steps == 3


def test_a_rank_that_ran_past_its_next_window_seals_at_once() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=3), batches(0, 9)), keeps_steps=True)
    world.at_step[4] = [Commit(1, 1, 0, Window(2, 2))]
    world.answers.append(lambda message: [Stop("done")] if isinstance(message, Sealed) and message.round == 2 else [])
    world.run()
    assert world.steps == 4
    assert world.diary[-5:] == ["adopt 1", "Adopted", "seal", "Sealed", "Leaving"]
    assert world.only(Sealed)[1].batches == 3


def test_an_open_window_tells_of_every_batch_and_ends_when_told() -> None:
    world = World(Commit(0, 0, 0, Window(1, None), batches(0, 9)))
    world.at_step[3] = [SealNow(1)]
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert [(p.step, p.batches, p.loss) for p in world.only(Progress)] == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0)]
    assert world.only(Sealed)[0].batches == 3


def test_a_seal_now_that_arrives_with_its_commit_is_kept() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2), batches(0, 9)))
    world.at_step[1] = [SealNow(2)]
    world.answers.append(
        lambda message: (
            [Commit(1, 1, 0, Window(2, 5))]
            if isinstance(message, Sealed) and message.round == 1
            else on(Sealed, Stop("done"))(message)
        )
    )
    world.run()
    assert [sealed.batches for sealed in world.only(Sealed)] == [2, 0]


def test_a_seal_now_concerns_no_later_window_of_its_round() -> None:
    world = World(Commit(0, 0, 0, Window(1, None), batches(0, 9)))
    world.at_step[2] = [SealNow(1)]
    world.at_step[5] = [SealNow(1)]
    world.answers.append(on(Sealed, Continue(Window(1, None)), Stop("done")))
    world.run()
    assert [sealed.batches for sealed in world.only(Sealed)] == [2, 3]


def test_an_open_window_ends_with_nothing_done_only_where_there_is_nothing_to_do() -> None:
    """As it is when a rank is fed while the others end theirs: it would be fed the same batch again."""
    fed = [Continue(Window(1, None), batches(0, 2)), SealNow(1)]
    world = World(Commit(0, 0, 0, None))
    world.answers += [lambda message: fed if isinstance(message, Adopted) else [], on(Sealed, Stop("done"))]
    world.run()
    assert [sealed.batches for sealed in world.only(Sealed)] == [1]
    idle = World(Commit(0, 0, 0, Window(1, None)), SealNow(1))
    idle.answers.append(on(Sealed, Stop("done")))
    idle.run()
    assert [sealed.batches for sealed in idle.only(Sealed)] == [0]


def test_a_late_seal_now_of_another_round_changes_nothing() -> None:
    world = World(Commit(0, 0, 0, Window(1, 3), batches(0, 9)))
    world.at_step[1] = [SealNow(0)]
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert world.only(Sealed)[0].batches == 3


def test_progress_in_a_known_window_is_told_now_and_then() -> None:
    world = World(Commit(0, 0, 0, Window(1, 120), batches(0, 120)))
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert [p.batches for p in world.only(Progress)] == [1, 51, 101]  # 10 ms per batch, every half second


def test_recall_gives_up_the_end_and_says_where() -> None:
    world = World(Commit(0, 0, 0, Window(1, 3), batches(0, 9)))
    world.at_step[1] = [Recall(2), Recall(5)]
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert world.only(Recalled) == [Recalled(0, 3), Recalled()]
    assert world.only(Sealed)[0].batches == 3
    assert world.followed == [Lease(0, 1), Lease(0, 2)]


def test_a_rank_without_leases_waits_for_a_grant_within_its_window() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2), batches(0, 1)))
    world.at_step[1] = [Grant(batches(5, 1))]
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert [entry for entry in world.diary if isinstance(entry, tuple)] == [(0, 0), (0, 5)]


def test_a_joiner_adopts_waits_and_goes_on_with_its_window() -> None:
    world = World(Commit(4, 1, 0))
    world.answers.append(on(Adopted, Continue(Window(5, 1), batches(3, 1))))
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert world.only(Adopted) == [Adopted(4, 0, 1001)]
    assert world.only(Sealed)[0].round == 5


def test_another_window_after_an_aborted_round_counts_from_its_own_seal() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2), batches(0, 9)))
    world.answers.append(on(Sealed, Continue(Window(1, 1)), Stop("done")))
    world.run()
    assert [message.batches for message in world.only(Sealed)] == [2, 1]


def test_an_excluded_rank_overwrites_and_forgets() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=1), batches(0, 9)), keeps_steps=True)
    world.at_step[2] = [Commit(1, 1, 0, excluded=True)]
    world.answers.append(lambda message: [Stop("")] if isinstance(message, Adopted) and message.round else [])
    world.run()
    assert world.diary[-4:] == ["adopt 1 over", "forget", "Adopted", "Leaving"]
    assert world.only(Adopted)[1].kept_steps == 0


def test_what_an_excluded_rank_had_run_ahead_is_trained_again_and_counts_then() -> None:
    world = World(Commit(0, 0, 0, Window(1, 2, run_ahead=3), batches(0, 9)), keeps_steps=True)
    world.at_step[4] = [Commit(1, 1, 0, Window(2, 3), excluded=True)]
    world.answers.append(on(Sealed, Grant(()), Stop("done")))
    loop = world.run()
    trained = [entry for entry in world.diary if isinstance(entry, tuple)]
    assert trained == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 2), (0, 3), (0, 4)]
    assert [(m.step, m.batches, m.losses) for m in world.only(Sealed)] == [
        (2, 2, ((0, 8.0 * (1 + 2), 16),)),
        (5, 3, ((0, 8.0 * (5 + 6 + 7), 24),)),
    ]
    assert world.only(Adopted)[1].step == 2
    assert loop.step == 5


def test_evaluation_sees_the_committed_state_within_a_declared_pause() -> None:
    world = World(Commit(3, 1, 0, evaluate=(0, 1)))
    world.answers.append(on(Resumed, Stop("done")))
    world.run()
    assert world.diary == [
        "adopt 1",
        "Adopted",
        "Paused",
        "show 1",
        "evaluate 0",
        "Evaluated",
        "evaluate 1",
        "Evaluated",
        "hide",
        "Resumed",
        "Leaving",
    ]
    assert world.only(Paused) == [Paused("evaluate")]
    assert world.only(Evaluated)[1] == Evaluated(1, 3, {"accuracy": 0.5}, 2.0)
    assert world.only(Resumed) == [Resumed("evaluate", 4.0)]


def test_of_two_commits_before_one_boundary_the_later_is_adopted_and_nothing_asked_is_lost() -> None:
    world = World(Commit(1, 0, 0, excluded=True, evaluate=(0,)), Commit(2, 1, 0, Window(3, 1), batches(0, 1)))
    world.answers.append(on(Sealed, Stop("done")))
    world.run()
    assert world.diary[:3] == ["adopt 1 over", "forget", "Adopted"]
    assert [message.epoch for message in world.only(Evaluated)] == [0]
    assert world.only(Sealed)[0].round == 3


def test_a_commit_for_a_later_step_is_adopted_there_and_no_earlier() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=2), batches(0, 9)), keeps_steps=True)
    world.answers.append(on(Sealed, Commit(1, 1, 0, Window(2, 3), adopt_at=3), Stop("done")))
    world.run()
    steps = [entry for entry in world.diary if isinstance(entry, tuple) or entry in ("seal", "adopt 1")]
    assert steps == [(0, 0), "seal", (0, 1), (0, 2), "adopt 1", (0, 3), "seal"]
    assert world.only(Adopted)[1] == Adopted(1, 3, 1001, kept_steps=2)


def test_a_rank_without_leases_waits_for_those_that_lie_before_its_adoption() -> None:
    world = World(Commit(0, 0, 0, Window(1, 1, run_ahead=2), batches(0, 2)), keeps_steps=True)
    world.answers.append(on(Sealed, Commit(1, 1, 0, adopt_at=3)))
    world.at_step[2] = [Grant(batches(7, 1))]
    world.answers.append(lambda message: [Stop("")] if isinstance(message, Adopted) and message.round == 1 else [])
    world.run()
    assert [entry for entry in world.diary if isinstance(entry, tuple)] == [(0, 0), (0, 1), (0, 7)]
    assert world.only(Adopted)[1].step == 3


def test_stop_ends_at_the_next_boundary_with_the_window_unfinished() -> None:
    world = World(Commit(0, 0, 0, Window(1, 5), batches(0, 9)))
    world.at_step[2] = [Stop("interrupted")]
    loop = world.run()
    assert world.steps == loop.step == 2
    assert world.only(Sealed) == []
    assert world.said[-1] == Leaving(2)


def test_a_failure_passes_through_and_its_batch_is_known() -> None:
    world = World(Commit(0, 0, 0, Window(1, 5), batches(4, 9)))

    def fail(lease: Lease, upcoming: Leases) -> Trained:
        raise ZeroDivisionError

    world.train = fail  # type: ignore[method-assign]
    loop = RankLoop(world, world, world, clock=lambda: 0.0)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert loop.current == Lease(0, 4)
    assert world.only(Leaving) == []


def test_a_message_for_another_phase_is_refused() -> None:
    with pytest.raises(WireError, match="sent Welcome to a rank that is admitted"):
        World(Welcome(0, 0, 1)).run()
