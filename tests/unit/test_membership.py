"""Lives of ranks: starts, admissions, losses, and when a loss ends the run."""

from typing import Any

import pytest

from flodl.protocol.effects import Admit, KillRank, OpenHost, RankExited, Send, StartRank
from flodl.protocol.membership import Loss, Phase, RankState, Roster
from flodl.protocol.messages import DataSpec, Failed, Hello, LayoutSpec, Refused, SectionSpec, TensorSpec
from flodl.protocol.settings import ControllerSettings


def layout(count: int = 4, name: str = "w") -> LayoutSpec:
    return LayoutSpec(
        4 * count, (SectionSpec("parameter", "f32", 0, count),), (TensorSpec(name, (count,), "f32", "parameter", 0),)
    )


def hello(plan: dict[str, Any] | None = None, model: LayoutSpec | None = None, length: int = 100) -> Hello:
    return Hello(1, "cpu", plan or {}, model or layout(), DataSpec(length, "tensor"))


def roster(world_size: int = 2, **changes: Any) -> Roster:
    given: dict[str, Any] = {"mode": "cpu-cadence", "dataset_length": 100, "batch_size": 4, "epochs": 1, **changes}
    made = Roster(ControllerSettings(world_size=world_size, **given))
    made.start_due(0.0)
    return made


def lose(made: Roster, state: RankState, code: int, round_: int | None = 5, now: float = 10.0) -> Loss:
    return made.lose(state, RankExited(state.rank, state.generation, code, words="last words"), round_, now)


def active(made: Roster, rank: int) -> RankState:
    state = made[rank]
    made.admit(state, hello())
    state.phase = Phase.ACTIVE
    return state


def test_every_rank_is_started_once_with_a_generation_of_its_own() -> None:
    made = Roster(ControllerSettings(3, "cpu-sync", 100, 4, 1))
    started = made.start_due(0.0)
    assert started == [StartRank(rank, rank, "the run starts") for rank in range(3)]
    assert made.start_due(100.0) == []


def test_the_first_hello_opens_the_host_and_the_others_are_admitted_to_it() -> None:
    made = roster()
    first, second = made.admit(made[1], hello()), made.admit(made[0], hello())
    assert [type(effect) for effect in first[:2]] == [OpenHost, Admit]
    assert second[0] == Admit(0, 0)
    assert made.layout_tensors == ((0, "w"),)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (hello(model=layout(8)), "w"),
        (hello(model=layout(name="v")), "v"),
        (hello(length=99), "99"),
        (hello(plan={"seed": 3}), "plan: seed is 3 here and None in the launcher"),
    ],
)
def test_a_newcomer_that_differs_is_refused_by_name(other: Hello, words: str) -> None:
    made = roster()
    made.admit(made[0], hello())
    effects = made.admit(made[1], other)
    refusal = effects[0]
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, Refused)
    assert any(words in difference for difference in refusal.message.differences)
    assert made[1].phase is Phase.ENDING
    assert not lose(made, made[1], 1).is_death
    assert made[1].phase is Phase.GONE


def test_a_refusal_says_three_differences_and_how_many_more() -> None:
    made = roster()
    made.admit(made[0], hello(plan={}))
    made.admit(made[1], hello(plan=dict.fromkeys(("a", "b", "c", "d", "e"), 1)))
    assert made.reasons[-1].count("in the launcher") == 3
    assert made.reasons[-1].endswith("; and 2 more")


def test_a_death_is_answered_by_a_restart_after_a_growing_back_off() -> None:
    made = roster(respawn=2)
    for n, wait in enumerate((0.5, 1.0)):
        state = active(made, 1)
        loss = lose(made, state, -9, now=10.0)
        assert loss == Loss(True, "rank 1 was killed by signal 9", "", "last words")
        assert state.start_at == 10.0 + wait
        assert made.start_due(10.0 + wait - 0.01) == []
        assert made.start_due(10.0 + wait) == [StartRank(1, 2 + n, f"restart {n + 1} of 2")]
    lose(made, active(made, 1), -9)
    assert made[1].phase is Phase.GONE


def test_a_new_life_starts_with_nothing_of_the_old() -> None:
    made = roster()
    state = active(made, 0)
    state.told, state.adopted, state.trained, state.is_recalling = 3, 2, 7, True
    state.failed = Failed("e", "t")
    lose(made, state, 1)
    made.start_due(100.0)
    assert (state.told, state.adopted, state.trained, state.failed) == (None, None, 0, None)
    assert not state.is_recalling


def test_what_a_dead_generation_says_is_for_nobody() -> None:
    made = roster()
    state = active(made, 0)
    assert made.current(0, 0) is state
    lose(made, state, -9)
    assert made.current(0, 0) is None
    made.start_due(100.0)
    assert made.current(0, 0) is None
    assert made.current(0, 2) is state
    assert made.current(7, 0) is None
    assert made.current(-1, 0) is None


def test_an_eviction_is_a_death_with_its_reason_and_may_be_restarted() -> None:
    made = roster()
    state = active(made, 0)
    assert made.kill(state, "evicted: silent for 5.0 s") == [KillRank(0, 0, "evicted: silent for 5.0 s")]
    assert not made.is_lost()
    assert made.awaits_somebody()
    loss = lose(made, state, -9)
    assert loss.reason == "rank 0 was evicted: silent for 5.0 s"
    assert state.phase is Phase.WAITING


def test_a_rank_told_to_stop_is_no_death_whatever_its_code() -> None:
    made = roster()
    state = active(made, 0)
    state.phase, state.ending_reason = Phase.ENDING, "all batches are contributed"
    assert lose(made, state, 1) == Loss(False, "all batches are contributed")
    assert made.deaths == 0


def test_a_second_life_is_not_excused_by_the_end_of_the_first() -> None:
    made = roster()
    state = active(made, 0)
    made.kill(state, "evicted: once")
    lose(made, state, -9)
    made.start_due(100.0)
    assert lose(made, state, -11).reason == "rank 0 was killed by signal 11"


@pytest.mark.parametrize(
    ("code", "round_", "ends_run"),
    [
        (0, None, "a rank failed before training began"),
        (3, None, "a rank failed before training began"),
        (-9, None, ""),
        (0, 0, ""),
        (3, 5, ""),
    ],
)
def test_a_script_that_ends_before_run_ends_a_run_that_has_not_formed(
    code: int, round_: int | None, ends_run: str
) -> None:
    made = roster()
    assert lose(made, made[0], code, round_).ends_run == ends_run


@pytest.mark.parametrize("round_", [None, 0])
def test_an_exception_before_the_first_round_ends_the_run(round_: int | None) -> None:
    made = roster()
    state = active(made, 0)
    state.failed = Failed("ValueError: x", "Traceback ...", (0, 3))
    loss = lose(made, state, 1, round_)
    assert loss == Loss(
        True,
        "rank 0 failed: ValueError: x",
        "a rank failed before the first round was committed",
        "Traceback ...",
    )


def test_the_same_batch_failing_on_two_ranks_ends_the_run() -> None:
    made = roster()
    for rank, ends_run in ((0, ""), (1, "batch 3 of epoch 0 failed twice")):
        state = active(made, rank)
        state.failed = Failed("ValueError: x", "", (0, 3))
        assert lose(made, state, 1).ends_run == ends_run


@pytest.mark.parametrize(("most", "deaths"), [(0, 1), (1, 2), (0.5, 3), (0.2, 1)])
def test_max_failures_is_a_count_or_a_share_of_the_ranks(most: float, deaths: int) -> None:
    made = roster(world_size=4, max_failures=most)
    losses = [lose(made, active(made, rank), -9) for rank in range(deaths)]
    assert [loss.ends_run != "" for loss in losses] == [False] * (deaths - 1) + [True]
    assert losses[-1].ends_run == f"{deaths} deaths are over max_failures={most}"


def test_an_absence_is_accounted_from_the_death_and_once() -> None:
    made = roster()
    state = active(made, 0)
    lose(made, state, -9, now=10.0)
    made.account_absence(state, 14.0)
    made.account_absences(20.0)
    assert state.pauses == {"absent": 4.0}


def test_nobody_is_left_only_when_nobody_is_on_the_way() -> None:
    made = roster(respawn=0)
    lose(made, active(made, 0), -9)
    assert not made.is_lost()
    lose(made, active(made, 1), -9)
    assert made.is_lost()
    assert not made.awaits_somebody()
