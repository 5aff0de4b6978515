"""Judgers: what may judge, what may be answered, and what happens if nothing is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group, current_time, fail_after, sleep
from anyio.lowlevel import checkpoint

from rollnest import Capacity, Engine, Limits, Sample, Status, Verdict
from rollnest.errors import Starved
from rollnest.testing import (
    RecordingInstrument,
    ScriptedController,
    assert_conserved,
    free_running_threads,
)

from .helpers import one_batch, spec

pytestmark = pytest.mark.anyio


class SyncJudger:
    def judge(self, sample: Sample) -> float:
        return 0.25


class AsyncJudger:
    async def judge(self, sample: Sample) -> float:
        await checkpoint()
        return 0.25


class CallableObject:
    def __call__(self, sample: Sample) -> float:
        return 0.25


class AsyncCallableObject:
    async def __call__(self, sample: Sample) -> float:
        await checkpoint()
        return 0.25


def plain(sample: Sample, score: float = 0.25) -> float:
    return score


async def asynchronous(sample: Sample, score: float = 0.25) -> float:
    await checkpoint()
    return score


JUDGERS: list[Any] = [
    SyncJudger(),
    AsyncJudger(),
    CallableObject(),
    AsyncCallableObject(),
    plain,
    asynchronous,
    partial(plain, score=0.25),
    partial(asynchronous, score=0.25),
    lambda sample: 0.25,
    lambda sample: asynchronous(sample),
]


@pytest.mark.parametrize("judger", JUDGERS, ids=lambda j: type(j).__name__)
async def test_whatever_may_judge(judger: Any) -> None:
    batch, _ = await one_batch(ScriptedController(), spec(judger=judger))
    assert [s.reward for s in batch.samples] == [0.25, 0.25]


async def test_no_judger_leaves_samples_unscored() -> None:
    batch, _ = await one_batch(ScriptedController(), spec(judger=None))
    assert [s.reward for s in batch.samples] == [None, None]
    assert batch.statistics.unscored == 2
    assert batch.statistics.reward_mean is None


@pytest.mark.parametrize("judger", [3, "judge", [plain]])
def test_what_may_not_judge_is_refused(judger: Any) -> None:
    with pytest.raises(TypeError, match="judger must be a Judger, a function of a sample or None"):
        spec(judger=judger)


def _torch_scalar() -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(0.5)


ACCEPTED: list[tuple[Callable[[], Any], float]] = [
    (lambda: 0.5, 0.5),
    (lambda: 2, 2.0),
    (lambda: True, 1.0),
    (lambda: False, 0.0),
    (lambda: np.float32(0.5), 0.5),
    (lambda: np.float64(0.5), 0.5),
    (lambda: np.int64(3), 3.0),
    (lambda: np.bool_(True), 1.0),
    (lambda: np.array(0.5), 0.5),
    (_torch_scalar, 0.5),
    (lambda: {"score": 0.5, "why": "half"}, 0.5),
    (lambda: {"score": np.float32(0.5)}, 0.5),
    (lambda: Verdict(0.5, parts={"format": 1.0}), 0.5),
]


@pytest.mark.parametrize(("make", "score"), ACCEPTED)
async def test_accepted_answers(make: Callable[[], Any], score: float) -> None:
    answer = make()

    async def judge(sample: Sample) -> Any:
        return answer

    batch, _ = await one_batch(ScriptedController(), spec(judger=judge, group_size=1))
    (sample,) = batch.samples
    assert sample.status is Status.COMPLETED
    assert type(sample.reward) is float
    assert sample.reward == score
    assert sample.verdict is not None
    if isinstance(answer, Verdict):
        assert sample.verdict is answer
    if isinstance(answer, dict):
        assert dict(sample.verdict.details) == {k: v for k, v in answer.items() if k != "score"}


REFUSED: list[Any] = [
    None,
    "1.0",
    b"1",
    float("nan"),
    float("inf"),
    -float("inf"),
    np.float32("nan"),
    np.array([0.5, 0.5]),
    [0.5],
    (0.5,),
    {},
    {"reward": 1.0},
    {"score": None},
    {"score": "1"},
    {"score": {"score": 1}},
    complex(1, 0),
    Fraction(1, 2),
    object(),
    10**400,
    asynchronous,
]


@pytest.mark.parametrize("answer", REFUSED, ids=lambda a: repr(a)[:20])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_refused_answers_fail_the_sample_and_score_nothing(answer: Any, sync: bool) -> None:
    async def judge(sample: Sample) -> Any:
        return answer

    def judge_in_thread(sample: Sample) -> Any:
        return answer

    recording = RecordingInstrument()
    task = spec(judger=judge_in_thread if sync else judge, group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved) as caught:
            await engine.next_batch(1)
    assert caught.value.reasons == {"judge": 1}
    (sample,) = recording.samples
    assert (sample.status, sample.verdict) == (Status.FAILED, None)
    assert sample.failure is not None
    assert sample.failure.kind == "judge"
    assert sample.policy_tokens > 0  # what was generated is kept


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_a_judger_that_raises_is_told_with_its_traceback(sync: bool) -> None:
    async def judge(sample: Sample) -> float:
        raise ZeroDivisionError("by zero")

    def judge_in_thread(sample: Sample) -> float:
        raise ZeroDivisionError("by zero")

    recording = RecordingInstrument()
    task = spec(judger=judge_in_thread if sync else judge, starve_after=1)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved, match="ZeroDivisionError: by zero"):
            await engine.next_batch(1)
    failure = recording.samples[0].failure
    assert failure is not None
    assert "in judge" in failure.traceback


async def test_a_judger_that_raises_stop_iteration() -> None:
    def judge(sample: Sample) -> float:
        return next(iter(()))

    task = spec(judger=judge, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved) as caught:
            await engine.next_batch(1)
    assert set(caught.value.reasons) == {"judge"}


async def test_an_async_judger_is_cancelled_at_its_limit() -> None:
    ended: list[float] = []

    async def judge(sample: Sample) -> float:
        try:
            await sleep(100)
        finally:
            ended.append(current_time())
        return 1.0

    task = spec(judger=judge, group_size=1, limits=Limits(judge=2.0), starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match=r"the judger took over 2\.0 s"):
            await engine.next_batch(1)
        assert ended == [2.0]


async def test_a_judgers_limit_stands_still_while_paused() -> None:
    async def judge(sample: Sample) -> float:
        await sleep(50)
        return 1.0

    task = spec(judger=judge, group_size=1, limits=Limits(judge=10.0))
    async with Engine(ScriptedController(), task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(1)
        async with engine.paused():
            await sleep(100)
    assert engine.statistics().total("delivered") == 1


async def test_a_judger_in_a_thread_holds_the_clock() -> None:
    def judge(sample: Sample) -> float:
        return 1.0

    async with Engine(ScriptedController(), spec(judger=judge, limits=Limits(judge=0.001))) as e:
        before = current_time()
        await e.next_batch(4)
        assert current_time() == before


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_judge_slots_are_a_bound(sync: bool) -> None:
    lock = threading.Lock()
    now, most = 0, 0

    def begin() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)

    def end() -> None:
        nonlocal now
        with lock:
            now -= 1

    async def judge(sample: Sample) -> float:
        begin()
        await sleep(1)
        end()
        return 1.0

    def judge_in_thread(sample: Sample) -> float:
        begin()
        threading.Event().wait(0.001)
        end()
        return 1.0

    task = spec(judger=judge_in_thread if sync else judge, group_size=8)
    await one_batch(ScriptedController(), task, 2, capacity=Capacity(judges=2))
    assert 1 <= most <= 2


async def until(condition: Callable[[], object]) -> None:
    """Keeps the loop busy, so that no clock can jump, until a thread has got that far."""
    while not condition():
        await checkpoint()


async def test_a_thread_that_blocks_keeps_its_slot_and_is_named_at_the_end() -> None:
    begun, release = threading.Event(), threading.Event()
    later: list[str] = []

    def judge(sample: Sample) -> float:
        if sample.visit == 0:
            begun.set()
            assert release.wait(20)
        later.append(sample.prompt.uid)
        return 1.0

    controller = ScriptedController()
    task = spec(judger=judge, group_size=1, shuffle=False, limits=Limits(judge=5.0))
    warned = pytest.warns(RuntimeWarning, match=r"1 worker threads.*judger of task/p0")
    with warned, ExitStack() as at_exit:
        async with (
            Engine(controller, task, capacity=Capacity(judges=2), exit_grace=1.0) as engine,
            create_task_group() as group,
        ):
            with free_running_threads():
                group.start_soon(engine.next_batch, 1)
                await until(begun.is_set)
                await sleep(5)
                await until(lambda: later)
            assert engine.statistics().abandoned_threads == 1
            assert engine.statistics().tasks["task"].dropped == {"judge": 1}
            await until(lambda: engine.statistics().batches)
            # One of two slots is left: the run goes on with it.
            batch = await engine.next_batch(3)
            assert [g.prompt.uid for g in batch.groups] == ["p2", "p3", "p4"]
            assert engine.statistics().abandoned_threads == 1
            at_exit.enter_context(free_running_threads())
    release.set()
    assert_conserved(engine, committed=controller.committed)


async def test_a_thread_that_ends_in_time_gives_its_slot_back() -> None:
    begun, release = threading.Event(), threading.Event()
    later: list[str] = []

    def judge(sample: Sample) -> float:
        if sample.visit == 0:
            begun.set()
            assert release.wait(20)
        later.append(sample.prompt.uid)
        return 1.0

    task = spec(judger=judge, group_size=1, shuffle=False, limits=Limits(judge=5.0))
    async with Engine(ScriptedController(), task) as engine, create_task_group() as group:
        with free_running_threads():
            group.start_soon(engine.next_batch, 1)
            await until(begun.is_set)
            await sleep(5)
            await until(lambda: later)
        assert engine.statistics().abandoned_threads == 1
        release.set()
        await until(lambda: not engine.statistics().abandoned_threads)
        await until(lambda: engine.statistics().batches)
        assert len(await engine.next_batch(2)) == 2


async def test_leaving_while_a_judger_runs_leaves_its_sample_unjudged() -> None:
    async def judge(sample: Sample) -> float:
        await sleep(1000)
        return 1.0

    recording = RecordingInstrument()
    controller = ScriptedController()
    task = spec(judger=judge, limits=Limits(judge=None))
    async with Engine(controller, task, instruments=[recording]) as engine:
        async with create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await sleep(5)
            group.cancel_scope.cancel()
    ((left, outcome),) = recording.groups
    assert outcome == "waiting"
    assert {(s.status, s.verdict) for s in left.samples} == {(Status.ABORTED, None)}
    assert_conserved(engine, committed=controller.committed)


async def test_members_are_judged_once_and_kept_ones_not_again() -> None:
    judged: list[tuple[int, int]] = []

    async def judge(sample: Sample) -> float:
        judged.append((sample.visit, sample.index))
        return 1.0

    batch, _ = await one_batch(ScriptedController(), spec(judger=judge), 5)
    assert sorted(judged) == [(v, i) for v in range(5) for i in range(2)]
    assert len(batch) == 5


async def test_a_run_whose_judge_slots_are_all_lost_says_so() -> None:
    # Judgements that only lost slots could serve fail, and say who holds them.
    begun, release = threading.Event(), threading.Event()

    def judge(sample: Sample) -> float:
        begun.set()
        assert release.wait(20)
        return 1.0

    task = spec(judger=judge, group_size=1, limits=Limits(judge=5.0), starve_after=3)
    engine = Engine(ScriptedController(), task, capacity=Capacity(judges=1), exit_grace=1.0)

    async def run() -> None:
        async with engine:
            await engine.next_batch(1)

    with free_running_threads(), fail_after(1000):
        async with create_task_group() as group:
            group.start_soon(until, begun.is_set)
            with (
                pytest.warns(RuntimeWarning, match="judger of task/"),
                pytest.raises(Starved, match="judger of task/"),
            ):
                await run()
    release.set()
