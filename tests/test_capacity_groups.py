"""`Capacity(groups=)`: one bound on the groups of all tasks, which no task can hold for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import pytest
from anyio import create_task_group, fail_after, move_on_after
from attrs import define

from rollnest import AsyncStrategy, Capacity, Engine, Prompt, Sampling, SyncStrategy, TaskSpec
from rollnest._admission import Admission
from rollnest.abc import Attempt, Instrument
from rollnest.errors import EngineBusy, InferenceError, Starved
from rollnest.testing import RecordingInstrument, Reply, ScriptedController, assert_conserved

from .helpers import prompts, spec

anyio_only = pytest.mark.anyio


class Most(Instrument):
    """Counts groups that run, and the most there were at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.started: list[str] = []

    def group_started(self, task: str, visit: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.started.append(task)

    def group_ended(self, group: object, outcome: str) -> None:
        self.now -= 1


def two(**options: object) -> list[TaskSpec]:
    return [
        spec(name="a", **options),
        spec(
            name="b", prompts=[Prompt(f"q{i}", token_ids=[500 + i]) for i in range(40)], **options
        ),
    ]


@anyio_only
@pytest.mark.parametrize("bound", [1, 3, 7])
async def test_so_many_groups_run_at_once_over_all_tasks(bound: int) -> None:
    most = Most()
    tasks = two(strategy=AsyncStrategy(lead=4))
    controller = ScriptedController(rate=10.0)
    capacity = Capacity(groups=bound)
    async with Engine(
        controller, tasks, batch_size=4, capacity=capacity, instruments=[most]
    ) as engine:
        for _ in range(5):
            with fail_after(1000):
                batch = await engine.next_batch()
            assert [batch.tasks[name].groups for name in "ab"] == [2, 2]
            async with engine.paused() as pause:
                await pause.update_weights({})
    assert most.most == bound
    assert_conserved(engine, committed=controller.committed)


@anyio_only
async def test_a_task_that_runs_ahead_cannot_keep_what_a_batch_lacks_from_starting() -> None:
    most = Most()
    tasks = [
        spec(name="greedy", strategy=AsyncStrategy(lead=1000, max_staleness=1000)),
        spec(name="b", prompts=[Prompt("q", token_ids=[500])], strategy=SyncStrategy()),
    ]
    engine = Engine(
        ScriptedController(rate=1.0, stop_every=10_000),
        tasks,
        batch_size=2,
        capacity=Capacity(groups=1),
        instruments=[most],
    )
    async with engine:
        await anyio.sleep(100)  # the first one has had five groups of 20 seconds by now
        with fail_after(45):  # what is left of its sixth, and one of the other's
            batch = await engine.next_batch()
    assert [batch.tasks[name].groups for name in ("greedy", "b")] == [1, 1]


@anyio_only
@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (30, 30)), ((1, 3), (15, 45))])
async def test_tasks_take_turns_by_weight(
    weights: tuple[int, int], shares: tuple[int, int]
) -> None:
    most = Most()
    tasks = [
        spec(name=name, weight=weight, strategy=AsyncStrategy(lead=1000, max_staleness=1000))
        for name, weight in zip("ab", weights, strict=True)
    ]
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    async with Engine(
        controller, tasks, batch_size=8, capacity=Capacity(groups=2), instruments=[most]
    ):
        await anyio.sleep(20 * 29.5)
    counts = Counter(most.started)
    assert abs(counts["a"] - shares[0]) <= 1
    assert abs(counts["b"] - shares[1]) <= 1


@anyio_only
async def test_a_task_without_prompts_or_luck_leaves_the_bound_to_the_others() -> None:
    def script(attempt: Attempt) -> Reply:
        if attempt.prompt_ids[0] >= 500:
            return Reply([5], error=InferenceError("400: no"))
        return Reply([5, 0], delay=1.0)

    lucky, unlucky = two(strategy=AsyncStrategy(lead=3))
    short = spec(name="short", prompts=prompts(2), epochs=1, strategy=AsyncStrategy(lead=3))
    engine = Engine(
        ScriptedController(script),
        [short, unlucky, lucky],
        batch_size=3,
        capacity=Capacity(groups=1),
    )
    async with engine:
        await anyio.sleep(200)
        figures = engine.statistics().tasks
        assert figures["short"].ready == 2
        assert figures["a"].ready == 4  # (1 + lead) shares of 1
        with fail_after(1000), pytest.raises(Starved, match="400: no"):
            await engine.next_batch()


@anyio_only
async def test_a_batch_that_nobody_waits_for_any_more_lets_the_others_go_on() -> None:
    sync, ahead = spec(name="sync"), spec(name="ahead", strategy=AsyncStrategy(lead=50))
    recording = RecordingInstrument()
    engine = Engine(
        ScriptedController(rate=10.0),
        [sync, ahead],
        batch_size=2,
        capacity=Capacity(groups=1),
        instruments=[recording],
    )
    async with engine:
        with move_on_after(0.1):
            await engine.next_batch(200)
        await anyio.sleep(500)
        assert engine.statistics().tasks["ahead"].ready == 51
        started = recording.named("group_started")
        assert sum(1 for task, _ in started if task == "sync") <= 1


@anyio_only
async def test_the_bound_counts_through_a_pause() -> None:
    most = Most()
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    tasks = two(strategy=AsyncStrategy(lead=4), sampling=Sampling(40))
    async with (
        Engine(
            controller, tasks, batch_size=4, capacity=Capacity(groups=3), instruments=[most]
        ) as engine,
        create_task_group() as group,
    ):
        await anyio.sleep(1)
        async with engine.paused():
            assert most.now == 3
            with pytest.raises(EngineBusy, match="0 of 4"):
                await engine.next_batch()
        group.start_soon(engine.next_batch, 12)
    assert most.most == 3


def test_the_bound_must_be_a_number_of_groups() -> None:
    with pytest.raises(ValueError, match=r"groups must be >= 1, got 0"):
        Capacity(groups=0)


@define
class Task:
    """An applicant without an engine."""

    wanted: int
    lacking: int = 0
    in_flight: int = 0
    woken: int = 0

    def wake(self) -> None:
        self.woken += 1


def admission(bound: int | None, **tasks: Task) -> tuple[Admission, Callable[[], str | None]]:
    made = Admission(bound, dict.fromkeys(tasks, 1.0))
    for name, task in tasks.items():
        made.join(name, task)

    def start() -> str | None:
        able = [name for name in tasks if made.room(name)]
        if not able:
            return None
        assert len(able) == 1
        tasks[able[0]].in_flight += 1
        made.started(able[0])
        return able[0]

    return made, start


def test_without_a_bound_a_task_starts_what_it_wants() -> None:
    made, _ = admission(None, a=Task(7), b=Task(0))
    assert made.room("a") == 7
    assert made.room("b") == 0


def test_one_that_was_idle_does_not_make_up_for_it() -> None:
    a, b = Task(1000), Task(0)
    _, start = admission(1000, a=a, b=b)
    assert {start() for _ in range(50)} == {"a"}
    b.wanted = 1000
    assert Counter(start() for _ in range(10)) == {"a": 5, "b": 5}


def test_what_is_lacking_comes_before_all_else() -> None:
    a, b = Task(10), Task(10, lacking=1)
    _, start = admission(3, a=a, b=b)
    assert [start() for _ in range(4)] == ["b", "b", "b", None]


def test_every_change_wakes_everybody_who_may_be_next() -> None:
    a, b = Task(1), Task(1)
    made, start = admission(5, a=a, b=b)
    start()
    made.changed("a")
    assert (a.woken, b.woken) == (2, 2)
    free, _ = admission(None, a=(c := Task(1)), b=(d := Task(1)))
    free.changed("a")
    assert (c.woken, d.woken) == (1, 0)
