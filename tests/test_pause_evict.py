"""EVICT ends the groups, keeps what they made, and never touches what has ended."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Sequence
from threading import Event as ThreadEvent

import anyio
import pytest
from anyio import create_task_group, from_thread, sleep

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    Limits,
    PauseMode,
    Response,
    Rollout,
    Sample,
    Sampling,
    Segment,
    Status,
)
from rollnest._table import GroupTable
from rollnest.abc import Attempt
from rollnest.errors import PauseFailed
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    free_running_threads,
)

from .helpers import prompts, spec

EVICT = PauseMode.EVICT
AHEAD = AsyncStrategy(max_staleness=2, lead=0)


def slow_second(attempt: Attempt) -> Reply:
    """The second member's answer takes long, the first time."""
    second = attempt.affinity.endswith("/1")
    return Reply([5, 6, 7, 0], delay=8.0 if second else 0.0)


class Judge:
    """An async judger that blocks for the prompts it is told to."""

    def __init__(self, *blocked: str, seconds: float = 60.0) -> None:
        self.blocked = set(blocked)
        self.seconds = seconds
        self.asked: list[tuple[str, int]] = []

    async def judge(self, sample: Sample) -> float:
        self.asked.append((sample.prompt.uid, sample.index))
        if sample.prompt.uid in self.blocked:
            await sleep(self.seconds)
        return 1.0


@pytest.mark.anyio
async def test_groups_wait_with_everything_they_received() -> None:
    controller = ScriptedController(rate=2.0, stop_every=10_000)
    recording = RecordingInstrument()
    task = spec(strategy=AHEAD)
    async with Engine(controller, task, batch_size=2, instruments=[recording]) as engine:
        await sleep(2.25)
        async with engine.paused(EVICT) as pause:
            assert pause.quiet_seconds < 0.05
            figures = engine.statistics().tasks["task"]
            assert (figures.flight, figures.waiting) == (0, 2)
            assert [outcome for _, outcome in recording.groups] == ["waiting", "waiting"]
            for group, _ in recording.groups:
                for sample in group.samples:
                    assert sample.status is Status.ABORTED
                    assert not sample.unjudged
                    assert sample.policy_tokens == 4
            assert_conserved(engine, committed=controller.committed)
            await pause.update_weights({})
        batch = await engine.next_batch()
        assert {group.visit for group in batch.groups} == {0, 1}  # before fresh prompts
        assert engine.statistics().total("redrawn") == 2
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.anyio
async def test_finished_members_and_groups_are_never_cancelled() -> None:
    controller = ScriptedController(slow_second)
    recording = RecordingInstrument()
    judge = Judge()

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=20)

    task = spec(loop=loop, judger=judge, strategy=AHEAD, prompts=prompts(1))
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await sleep(4.0)
        async with engine.paused(EVICT):
            pass
        await sleep(0.5)
        before = len(controller.prompts)
        batch = await engine.next_batch()
    first, second = recording.groups[0][0].samples
    assert (first.status, second.status) == (Status.COMPLETED, Status.ABORTED)
    assert next(batch.samples) is first
    assert judge.asked.count((first.prompt.uid, 0)) == 1
    assert before == 3  # the first member was not asked for again
    assert engine.statistics().total("produced_samples") == 2
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.anyio
async def test_a_group_that_ends_in_the_pause_is_ready() -> None:
    judge = Judge("p0", "p1", seconds=1.0)
    task = spec(judger=judge, strategy=AHEAD, shuffle=False)
    async with Engine(ScriptedController(), task, batch_size=2) as engine:
        await sleep(0.5)
        async with engine.paused(EVICT) as pause:
            assert 0.5 <= pause.quiet_seconds < 0.55  # the judgers' answers were waited for
            assert engine.statistics().total("ready") == 2
            assert len(await engine.next_batch()) == 2
        assert len(judge.asked) == 4


@pytest.mark.anyio
async def test_a_cut_judger_is_asked_again_without_a_new_answer() -> None:
    judge = Judge("p0")
    controller = ScriptedController()
    recording = RecordingInstrument()
    task = spec(judger=judge, strategy=AHEAD, shuffle=False, prompts=prompts(2), epochs=1)
    async with Engine(controller, task, batch_size=2, instruments=[recording]) as engine:
        await sleep(1)
        requests = len(controller.prompts)
        async with engine.paused(EVICT, grace=3.0) as pause:
            assert 3.0 <= pause.quiet_seconds <= 3.05
            figures = engine.statistics().tasks["task"]
            assert (figures.ready, figures.waiting, figures.flight) == (1, 1, 0)
        group = next(g for g, outcome in recording.groups if outcome == "waiting")
        assert [(s.status, s.unjudged, s.verdict) for s in group.samples] == [
            (Status.ABORTED, True, None)
        ] * 2
        assert_conserved(engine, committed=controller.committed)
        judge.blocked.clear()
        batch = await engine.next_batch()
        assert len(controller.prompts) == requests
    redone = next(g for g in batch.groups if g.visit == group.visit)
    assert [s.segments for s in redone.samples] == [s.segments for s in group.samples]
    assert [s.reward for s in redone.samples] == [1.0, 1.0]
    assert sorted(judge.asked) == [("p0", 0)] * 2 + [("p0", 1)] * 2 + [("p1", 0), ("p1", 1)]
    assert engine.statistics().total("produced_samples") == 4
    assert [s.status for s in recording.samples] == [Status.COMPLETED] * 4  # told once each
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.anyio
async def test_a_group_judger_that_is_cut_is_asked_again_with_the_same_samples() -> None:
    class Groups:
        judges_groups = True

        def __init__(self) -> None:
            self.asked: list[Sequence[Sample]] = []

        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            self.asked.append(samples)
            await sleep(60 if len(self.asked) == 1 else 0)
            return [1.0] * len(samples)

    judge, controller = Groups(), ScriptedController()
    task = spec(judger=judge, strategy=AHEAD, prompts=prompts(1), epochs=1)
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(1)
        for _ in range(2):  # twice: what is kept is kept again
            async with engine.paused(EVICT, grace=0.0) as pause:
                assert pause.quiet_seconds < 0.01
                assert engine.statistics().total("waiting") == 1
        batch = await engine.next_batch()
    assert len(controller.prompts) == 2
    assert [s.segments for s in batch.samples] == [s.segments for s in judge.asked[0]]
    assert engine.statistics().total("produced_samples") == 2
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.anyio
async def test_a_judger_that_needs_the_policy_is_not_waited_for() -> None:
    class AsksThePolicy(Judge):
        uses_policy = True

    judge = AsksThePolicy("p0", "p1")
    async with Engine(
        ScriptedController(), spec(judger=judge, strategy=AHEAD, shuffle=False), batch_size=2
    ) as engine:
        await sleep(1)
        async with engine.paused(EVICT) as pause:
            assert pause.quiet_seconds < 0.05
            assert engine.statistics().total("waiting") == 2
        judge.blocked.clear()
        assert len(await engine.next_batch()) == 2


@pytest.mark.anyio
async def test_a_thread_judger_is_abandoned_within_grace_and_keeps_its_slot() -> None:
    stuck, entered = ThreadEvent(), anyio.Event()

    def judge(sample: Sample) -> float:
        if sample.prompt.uid == "p0" and not entered.is_set():
            from_thread.run_sync(entered.set)
            stuck.wait()
        return 1.0

    task = spec(
        judger=judge,
        strategy=AHEAD,
        shuffle=False,
        group_size=1,
        prompts=prompts(2),
        epochs=1,
        limits=Limits(judge=None),
    )
    engine = Engine(
        ScriptedController(), task, batch_size=2, capacity=Capacity(judges=2), exit_grace=1.0
    )

    async def run() -> None:
        async with engine:
            await entered.wait()
            await engine.next_batch(1)
            async with engine.paused(EVICT, grace=2.0) as pause:
                assert 2.0 <= pause.quiet_seconds <= 2.05
                assert engine.statistics().abandoned_threads == 1
                assert engine.statistics().total("waiting") == 1
            await engine.next_batch(1)  # the other slot judges it
            assert engine.statistics().abandoned_threads == 1

    with free_running_threads():
        try:
            with pytest.warns(RuntimeWarning, match="judger of task/p0"):
                await run()
        finally:
            stuck.set()


@pytest.mark.anyio
async def test_a_batch_that_has_its_groups_waits_for_no_judger() -> None:
    judge = Judge("p1")
    task = spec(judger=judge, strategy=AsyncStrategy(max_staleness=1, lead=1), shuffle=False)
    async with Engine(ScriptedController(), task, batch_size=1) as engine:
        await sleep(1)
        before = anyio.current_time()
        batch: Batch = await engine.next_batch()
        assert anyio.current_time() == before
        assert {s.prompt.uid for s in batch.samples} == {"p0"}


def test_expired_rows_are_drawn_again_first_then_aborted_ones() -> None:
    table = GroupTable("task", max_staleness=0, retries=3)
    drawn = [table.draw(prompt) for prompt in prompts(4)]
    for row in drawn:
        status = Status.ABORTED if row.visit < 2 else Status.COMPLETED
        sample = Sample(
            task="task",
            prompt=row.prompt,
            visit=row.visit,
            index=0,
            status=status,
            segments=_answer(),
            unjudged=row.visit == 1,
        )
        table.settle(row, [sample], 1.0)
    assert table.expire(1) == 2
    again = [table.redraw(0) for _ in range(5)]
    assert [None if row is None else row.visit for row in again] == [2, 3, 0, 1, None]
    assert list(drawn[1].unjudged) == [0]
    assert drawn[1].unjudged[0].status is Status.COMPLETED
    assert (table.dropped_tokens, table.expired_tokens) == (3, 2)
    table.balance()


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.EXPIRED, Status.ABORTED])
def test_only_an_aborted_answer_is_unjudged(status: Status) -> None:
    with pytest.raises(ValueError, match="unjudged"):
        Sample(
            task="task",
            prompt=prompts(1)[0],
            visit=0,
            index=0,
            status=status,
            unjudged=True,
            segments=() if status is Status.ABORTED else _answer(),
        )


def _answer() -> tuple[Segment, ...]:
    response = Response()
    response.append_policy([5], [-1.0], 0)
    return (Segment(memoryview(array("i", [1])), response.seal()),)


@pytest.mark.anyio
async def test_groups_that_do_not_end_fail_the_pause_and_production_goes_on() -> None:
    held = anyio.Event()

    async def loop(rollout: Rollout) -> None:
        try:
            await rollout.generate()
        finally:
            with anyio.CancelScope(shield=True):
                await held.wait()

    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(loop=loop, strategy=AHEAD, sampling=Sampling(20))
    async with Engine(controller, task, batch_size=1, control_timeout=4.0) as engine:
        await sleep(2.5)
        before = anyio.current_time()
        with pytest.raises(PauseFailed, match="1 groups did not end"):
            async with engine.paused(EVICT, grace=1.0):
                pytest.fail("entered")
        assert anyio.current_time() - before <= 5.0 + 1e-6
        held.set()
        batch = await engine.next_batch()
        assert batch.groups[0].visit == 0
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.anyio
async def test_a_pause_that_is_given_up_spares_who_was_not_cancelled() -> None:
    judge = Judge("p0", seconds=5.0)
    task = spec(judger=judge, strategy=AHEAD, shuffle=False)
    async with Engine(ScriptedController(), task, batch_size=1) as engine:
        await sleep(1)
        with anyio.move_on_after(1.0) as scope:
            async with engine.paused(EVICT, grace=3.0):
                pytest.fail("entered")
        assert scope.cancelled_caught
        await engine.next_batch()
        assert engine.statistics().total("redrawn") == 0
        assert len(judge.asked) >= 2


@pytest.mark.anyio
async def test_evict_with_a_consumer_that_waits() -> None:
    got: list[Batch] = []
    controller = ScriptedController(rate=5.0, stop_every=10_000)

    async def consume(engine: Engine) -> None:
        got.append(await engine.next_batch(2))

    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(consume, engine)
        await sleep(1.1)
        async with engine.paused(EVICT) as pause:
            await pause.update_weights({})
    assert {s.oldest_version for s in got[0].samples} == {1}
    assert engine.statistics().total("drawn") == 2
    assert_conserved(engine, committed=controller.committed)


class Held:
    """Something that a frame holds; it can be told when it is gone."""


@pytest.mark.anyio
async def test_what_an_evicted_loop_or_judger_held_is_gone_without_the_garbage_collector() -> None:
    held: list[weakref.ref[Held]] = []

    def hold() -> Held:
        held.append(weakref.ref(one := Held()))
        return one

    async def loop(rollout: Rollout) -> None:
        kept = hold()
        if rollout.index:
            await rollout.generate()
        await rollout.generate()
        del kept

    class Holding(Judge):
        async def judge(self, sample: Sample) -> float:
            kept = hold()
            verdict = await super().judge(sample)
            del kept
            return verdict

    def reply(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=0.0 if attempt.affinity.endswith("/0") else 8.0)

    judge = Holding("p0", "p1")
    task = spec(strategy=AHEAD, loop=loop, judger=judge)
    async with Engine(ScriptedController(reply), task, batch_size=2) as engine:
        await sleep(1.0)
        assert len(judge.asked) == 2
        gc.collect()
        gc.disable()
        try:
            async with engine.paused(EVICT, grace=1.0):
                assert engine.statistics().total("flight") == 0
                assert len(held) == 6
                assert [ref() for ref in held] == [None] * 6
        finally:
            gc.enable()
