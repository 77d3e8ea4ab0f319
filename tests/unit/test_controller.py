"""The controller driven by hand, message by message: what it does at each, and in which order."""

from typing import Any

import pytest

from flodl.protocol.controller import Controller
from flodl.protocol.effects import (
    CommitRound,
    Committed,
    Effect,
    EndRun,
    Interrupted,
    KillRank,
    RankExited,
    RankHeard,
    RankSilent,
    RankStopped,
    Record,
    Reduce,
    Reduced,
    ReleaseMemory,
    Send,
    StartFailed,
    StartRank,
)
from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    DataSpec,
    Failed,
    FromRank,
    Hello,
    LayoutSpec,
    Leaving,
    Paused,
    Progress,
    Recalled,
    Resumed,
    Sealed,
    SealNow,
    SectionSpec,
    Seed,
    Stop,
    TensorSpec,
    WindowReport,
)
from flodl.protocol.settings import ControllerSettings

LAYOUT = LayoutSpec(16, (SectionSpec("parameter", "f32", 0, 4),), (TensorSpec("w", (4,), "f32", "parameter", 0),))
NOTHING = WindowReport(0, 0.0, 0.0, 0.0)


class Hand:
    """A controller and the hand that plays its driver and ranks. Rank r lives as generation r unless told otherwise."""

    def __init__(self, world_size: int = 2, **changes: Any) -> None:
        given: dict[str, Any] = {"mode": "cpu-sync", "dataset_length": 40, "batch_size": 4, "epochs": 1, "prefetch": 0}
        self.controller = Controller(ControllerSettings(world_size=world_size, **{**given, **changes}))
        self.now = 0.0
        self.world_size = world_size
        self.controller.start(0.0)

    def say(self, rank: int, message: FromRank, generation: int | None = None) -> list[Effect]:
        return self.controller.receive(rank, rank if generation is None else generation, message, self.now)

    def tell(self, event: Any) -> list[Effect]:
        return self.controller.tell(event, self.now)

    def hello(self, rank: int, generation: int | None = None) -> list[Effect]:
        return self.say(rank, Hello(1, "cpu", {}, LAYOUT, DataSpec(40, "t")), generation)

    def formed(self) -> "Hand":
        """Everyone is at round 0 and has its first window."""
        for rank in range(self.world_size):
            self.hello(rank)
        self.reduce_and_commit(self.say(0, Sealed(0, 0, 0, 0, NOTHING)))
        for rank in range(self.world_size):
            self.say(rank, Adopted(0, 0, 7))
        return self

    def seal(self, rank: int, batches: int, round_: int = 1) -> list[Effect]:
        report = WindowReport(max(0, batches - 1), 10.0 * max(0, batches - 1), 0.0, 10.0)
        return self.say(rank, Sealed(round_, batches, batches, 4 * batches, report, ((0, 4.0 * batches, 4 * batches),)))

    def reduce(self, effects: list[Effect], finite: tuple[bool, ...] | None = None, drift: float = 0.0) -> list[Effect]:
        (reduce,) = [effect for effect in effects if isinstance(effect, Reduce)]
        count = len(reduce.contributions)
        return self.tell(Reduced(reduce.attempt, finite or (True,) * count, (drift,) * count, 1.0, 7, 0.1, "w"))

    def reduce_and_commit(self, effects: list[Effect]) -> list[Effect]:
        return self.commit(self.reduce(effects))

    def commit(self, effects: list[Effect]) -> list[Effect]:
        (commit,) = [effect for effect in effects if isinstance(effect, CommitRound)]
        return self.tell(Committed(commit.round, commit.round % 2, 7, 0.0))


def sent(effects: list[Effect], kind: type) -> dict[int, Any]:
    return {e.rank: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


def of(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def records(effects: list[Effect], kind: str) -> list[dict[str, Any]]:
    return [effect.fields for effect in effects if isinstance(effect, Record) and effect.kind == kind]


def test_the_lowest_rank_seeds_the_run_once_everyone_is_here() -> None:
    hand = Hand()
    assert sent(hand.hello(1), Seed) == {}
    effects = hand.hello(0)
    assert list(sent(effects, Seed)) == [0]
    assert records(effects, "phase")[0]["reason"] == "2 of 2 ranks are here; rank 0 gives the initial state"
    assert hand.controller.phase == "forming"


def test_a_commit_is_journalled_before_any_rank_is_told() -> None:
    hand = Hand()
    hand.hello(0)
    hand.hello(1)
    decided = hand.reduce(hand.say(0, Sealed(0, 0, 0, 0, NOTHING)))
    assert len(of(decided, CommitRound)) == 1
    assert sent(decided, Commit) == {}
    assert sorted(sent(hand.commit(decided), Commit)) == [0, 1]


@pytest.mark.parametrize(("is_elastic", "held"), [(False, [4, 5]), (True, [])])
def test_the_guard_bears_a_standing_spread_where_the_blend_is_elastic(is_elastic: bool, held: list[int]) -> None:
    hand = Hand(mode="cpu-async", is_elastic=is_elastic, epochs=9).formed()
    effects: list[Effect] = []
    for round_, drift in enumerate([0.1, 0.1005, 0.101, 0.1015, 0.102], start=1):
        hand.seal(0, 1, round_)
        decided = hand.reduce(hand.seal(1, 1, round_), drift=drift)
        effects += decided
        hand.commit(decided)
        for rank in range(2):
            hand.say(rank, Adopted(round_, round_, 7))
    assert [record["round"] for record in records(effects, "guard")] == held


def test_a_commit_told_twice_is_told_to_the_ranks_once() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    decided = hand.reduce(hand.seal(1, 1))
    assert len(sent(hand.commit(decided), Commit)) == 2
    assert hand.commit(decided) == []


def test_a_round_begins_when_the_last_rank_with_a_window_has_sealed() -> None:
    hand = Hand().formed()
    assert of(hand.seal(1, 1), Reduce) == []
    (reduce,) = of(hand.seal(0, 1), Reduce)
    assert [(c.rank, c.weight) for c in reduce.contributions] == [(0, 0.5), (1, 0.5)]


def test_the_commit_names_what_it_settles() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    (commit,) = of(hand.reduce(hand.seal(1, 1)), CommitRound)
    assert commit.contributed == (BatchRange(0, 0, 2),)
    assert not commit.is_seed


def test_a_death_frees_the_round_that_waited_for_it() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    effects = hand.tell(RankExited(1, 1, -9, 1))
    assert records(effects, "exit")[0]["returned"] == 1
    assert ReleaseMemory(1, 1) in effects
    (reduce,) = of(effects, Reduce)
    assert [c.rank for c in reduce.contributions] == [0]


def test_the_memory_of_a_dead_rank_that_had_sealed_stays_until_the_commit() -> None:
    hand = Hand().formed()
    hand.seal(1, 1)
    assert of(hand.tell(RankExited(1, 1, -9, 1)), ReleaseMemory) == []
    assert ReleaseMemory(1, 1) in hand.reduce_and_commit(hand.seal(0, 1))


def test_what_a_rank_seals_for_another_round_is_not_lost() -> None:
    """Seen: a forked copy of a rank sealed an old round; its batches counted as sealed for ever, and the run waited."""
    hands = [Hand().formed() for _ in range(2)]
    (kill,) = of(hands[1].seal(1, 1, round_=7), KillRank)
    assert kill.reason == "evicted: sealed round 7 while round 1 is open"
    exits = [records(hand.tell(RankExited(1, 1, -9, 1)), "exit")[0] for hand in hands]
    assert exits[0]["returned"] == exits[1]["returned"] == 1


def test_the_end_of_an_attempt_that_was_replaced_is_ignored() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    first = hand.seal(1, 1)
    second = hand.reduce(first, finite=(True, False))
    assert of(second, Reduce)[0].attempt == of(first, Reduce)[0].attempt + 1
    assert hand.reduce(first) == []
    told = sent(hand.reduce_and_commit(second), Commit)
    assert (told[0].excluded, told[1].excluded) == (False, True)


def test_no_sum_is_written_to_a_buffer_that_a_joiner_still_reads() -> None:
    hand = Hand(respawn=1).formed()
    hand.tell(RankExited(1, 1, -9, 0))
    hand.now = 1.0
    hand.controller.tick(hand.now)
    hand.hello(1, generation=2)  # is told round 0, in buffer 0
    hand.reduce_and_commit(hand.seal(0, 1))
    hand.say(0, Adopted(1, 1, 7))
    blocked = hand.seal(0, 1, round_=2)
    assert of(blocked, Reduce) == []
    assert len(of(hand.say(1, Adopted(0, 0, 7), generation=2), Reduce)) == 1


def test_a_joiner_gets_a_window_when_it_has_adopted_and_not_before() -> None:
    hand = Hand(respawn=1).formed()
    hand.tell(RankExited(1, 1, -9, 0))
    hand.now = 1.0
    hand.controller.tick(hand.now)
    assert sent(hand.hello(1, generation=2), Commit)[1].window is None
    told = sent(hand.reduce_and_commit(hand.seal(0, 1)), Commit)
    assert told[0].window is not None
    assert told[1].window is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Sealed(1, 9, 9, 36, NOTHING), "sealed 9 batches and held 1"),
        (Sealed(2, 1, 1, 4, NOTHING), "sealed round 2 while round 1 is open"),
        (Hello(1, "cpu", {}, LAYOUT, DataSpec(40, "t")), "said hello twice"),
        (Adopted(5, 0, 7), "adopted round 5, which is not committed"),
        (Recalled(0, 0), "gave up leases without being asked"),
    ],
)
def test_a_rank_that_contradicts_the_ledger_or_the_round_is_evicted(message: FromRank, words: str) -> None:
    hand = Hand().formed()
    (kill,) = of(hand.say(1, message), KillRank)
    assert words in kill.reason
    assert not hand.controller.is_over


def test_leaving_untold_and_exiting_with_zero_is_a_death() -> None:
    hand = Hand().formed()
    hand.say(1, Leaving(3))
    assert records(hand.tell(RankExited(1, 1, 0)), "exit")[0]["is_death"]


def test_leaving_when_told_is_none() -> None:
    hand = Hand().formed()
    assert sorted(sent(hand.tell(Interrupted("Ctrl-C")), Stop)) == [0, 1]
    hand.say(0, Leaving(0))
    assert not records(hand.tell(RankExited(0, 0, 0)), "exit")[0]["is_death"]
    assert hand.tell(RankExited(1, 1, 0))[-1] == EndRun("interrupted: Ctrl-C", True)


def test_a_second_interrupt_changes_nothing_here() -> None:
    hand = Hand().formed()
    hand.tell(Interrupted("Ctrl-C"))
    assert hand.tell(Interrupted("Ctrl-C")) == []


def test_an_interrupt_waits_for_the_commit_that_is_under_way() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    decided = hand.reduce(hand.seal(1, 1))
    hand.tell(Interrupted("Ctrl-C"))
    hand.tell(RankExited(0, 0, 0))
    assert of(hand.tell(RankExited(1, 1, 0)), EndRun) == []
    assert len(of(hand.commit(decided), EndRun)) == 1


def test_a_rank_that_is_told_to_stop_and_does_not_is_killed_after_the_grace() -> None:
    hand = Hand().formed()
    hand.tell(Interrupted("Ctrl-C"))
    due = hand.controller.next_deadline()
    assert due == 10.0
    assert [kill.rank for kill in of(hand.controller.tick(due), KillRank)] == [0, 1]


def test_silence_evicts_a_rank_that_trains_and_not_one_that_starts() -> None:
    hand = Hand()
    hand.hello(0)
    assert of(hand.tell(RankSilent(1, 1, 5.0)), KillRank) == []
    assert hand.controller.next_deadline() == 60.0
    (kill,) = of(hand.controller.tick(60.0), KillRank)
    assert (kill.rank, kill.reason) == (
        1,
        "evicted: it has not reached run() 60 s after its start; load data later (in model() or the data set's items), "
        "or raise stall_s",
    )
    trained = Hand().formed()
    (kill,) = of(trained.tell(RankSilent(1, 1, 5.0)), KillRank)
    assert kill.reason == "evicted: silent for 5.0 s"


def test_a_script_that_takes_long_is_waited_for() -> None:
    hand = Hand(start_limit_s=300.0)
    hand.hello(0)
    hand.tell(RankSilent(1, 1, 5.0))
    assert of(hand.controller.tick(299.0), KillRank) == []
    assert [kill.rank for kill in of(hand.controller.tick(300.0), KillRank)] == [1]


def test_a_rank_that_is_stopped_while_it_starts_is_replaced() -> None:
    hand = Hand()
    hand.hello(0)
    (kill,) = of(hand.tell(RankStopped(1, 1, 5.0)), KillRank)
    assert (kill.rank, kill.reason) == (1, "evicted: stopped by a signal for 5.0 s")
    assert of(hand.tell(RankStopped(1, 1, 6.0)), KillRank) == []
    hand.tell(RankExited(1, 1, -9))
    due = hand.controller.next_deadline()
    assert due is not None
    hand.now = due
    assert [(start.rank, start.generation) for start in of(hand.controller.tick(due), StartRank)] == [(1, 2)]


def test_steps_that_a_blend_did_not_keep_are_reported() -> None:
    hand = Hand().formed()
    hand.seal(0, 1)
    hand.commit(hand.reduce(hand.seal(1, 1)))
    hand.say(0, Adopted(1, 4, 0, kept_steps=1))
    hand.say(1, Adopted(1, 1, 0))
    assert hand.controller.summary()["discarded_steps"] == 2


def test_a_starting_rank_that_is_heard_again_is_not_watched() -> None:
    hand = Hand()
    hand.tell(RankSilent(1, 1, 5.0))
    hand.tell(RankHeard(1, 1))
    assert hand.controller.next_deadline() is None


def test_a_declared_pause_is_told_when_it_lasts_but_not_judged_and_is_accounted() -> None:
    hand = Hand().formed()
    for rank in range(2):
        hand.say(rank, Paused("compile"))
    assert hand.controller.next_deadline() == 60.0
    told = hand.controller.tick(60.0)
    assert [line["reason"] for line in records(told, "warning")] == [
        f"rank {rank} has been in 'compile' for 60 s; it is waited for" for rank in range(2)
    ]
    assert hand.controller.next_deadline() is None
    hand.now = 500.0
    hand.say(0, Resumed("compile", 500.0))
    assert hand.controller.next_deadline() == 530.0
    assert hand.controller.summary()["ranks"][0]["pauses_s"] == {"compile": 500.0}


def test_a_seed_that_hangs_is_evicted_like_any_other() -> None:
    hand = Hand(stall_s=4.0)
    hand.hello(0)
    hand.hello(1)
    assert hand.controller.next_deadline() == 2.0
    hand.controller.tick(2.0)
    assert [kill.rank for kill in of(hand.controller.tick(4.0), KillRank)] == [0]


def test_a_process_that_cannot_be_started_ends_a_run_that_has_not_formed() -> None:
    hand = Hand()
    end = hand.tell(StartFailed(1, 1, "no such file: python"))[-1]
    assert end == EndRun(
        "a rank failed before training began: rank 1 exited with code 127", True, "no such file: python"
    )


def test_a_failure_before_the_first_round_has_the_traceback() -> None:
    hand = Hand().formed()
    hand.say(1, Failed("ValueError: x", "Traceback (most recent call last) ...", (0, 1)))
    effects = hand.tell(RankExited(1, 1, 1, 1, "words"))
    assert effects[-1].traceback == "Traceback (most recent call last) ..."  # type: ignore[union-attr]
    assert [kill.rank for kill in of(effects, KillRank)] == [0]
    assert hand.controller.phase == "failed"
    assert hand.seal(0, 1) == []


def test_an_open_window_ends_with_the_slowest_and_then_the_others() -> None:
    hand = Hand(mode="cpu-cadence", dataset_length=4000).formed()
    assert sent(hand.say(0, Progress(9, 9)), SealNow) == {}
    assert list(sent(hand.say(1, Progress(3, 3)), SealNow)) == [1]
    assert sent(hand.say(0, Progress(10, 10)), SealNow) == {}
    assert list(sent(hand.seal(1, 4), SealNow)) == [0]


def test_an_open_window_is_topped_up_before_it_runs_dry() -> None:
    hand = Hand(mode="cpu-cadence", dataset_length=4000, prefetch=2).formed()
    granted = hand.say(0, Progress(6, 6))
    assert records(granted, "lease")[0]["batches"] == [[0, 20, 10]]


def test_a_run_is_done_when_everyone_has_left_and_the_summary_adds_up() -> None:
    hand = Hand(world_size=1, dataset_length=8).formed()
    for round_ in (1, 2):
        hand.reduce_and_commit(hand.seal(0, 1, round_))
        last = hand.say(0, Adopted(round_, round_, 7))
    assert list(sent(last, Stop)) == [0]
    hand.say(0, Leaving(2))
    assert hand.tell(RankExited(0, 0, 0))[-1] == EndRun("all batches are contributed", False)
    summary = hand.controller.summary()
    assert (summary["samples"], summary["batches"], summary["rounds"]) == (8, 2, 2)
    assert summary["epochs"][0]["loss"] == 1.0
    assert hand.controller.phase == "done"


def test_batches_begun_by_a_dead_rank_and_not_sealed_are_reported_as_recomputed() -> None:
    hand = Hand().formed()
    hand.tell(RankExited(1, 1, -9, 5))
    assert hand.controller.summary()["recomputed"] == 5
