"""A cancellation that nobody asked for is an error of the code it comes from, and ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest
from anyio import create_task_group, fail_after, sleep

from rollnest import AgentLoop, Engine, LiveGroup, Rollout, Sample, Status
from rollnest.abc import Attempt
from rollnest.errors import EngineBroken, InferenceError, Starved, ToolError
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    virtual_backends,
)

from .helpers import cancel_nobody, prompts, spec

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize(
    "anyio_backend", [virtual_backends()[0]()], ids=["asyncio"]
)  # trio has no cancellation without a scope


async def await_a_cancelled_task() -> None:
    """What asyncio raises in who awaits a task that somebody else cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(1))
    task.cancel()
    await task


async def cancel_own_task() -> None:
    """What asyncio raises in a task that was cancelled without a scope."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, 3])
async def test_its_sample_fails_its_siblings_end_and_production_goes_on(size: int) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "p0" and rollout.index == 0:
            await cancel_nobody()

    controller, recording = ScriptedController(rate=10.0), RecordingInstrument()
    task = spec(loop=loop, group_size=size, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with fail_after(1000):
            batches = [await engine.next_batch(1) for _ in range(3)]
        assert_conserved(engine, committed=controller.committed)
    assert [b.groups[0].prompt.uid for b in batches] == ["p1", "p2", "p3"]
    (lost, _), *_ = recording.groups
    failed, *others = lost.samples
    assert failed.failure is not None
    assert failed.failure.message == "the agent loop cancelled itself"
    assert {sample.status for sample in others} <= {Status.COMPLETED}
    assert engine.statistics().tasks["task"].failures == {"loop": 1}


@on_asyncio
@pytest.mark.parametrize("stray", [await_a_cancelled_task, cancel_own_task])
async def test_as_asyncio_makes_them(stray: object) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "p0":
            await stray()  # type: ignore[operator]

    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(loop=loop, group_size=1, shuffle=False)) as engine:
        with fail_after(1000):
            batches = [await engine.next_batch(1) for _ in range(3)]
    assert [b.groups[0].prompt.uid for b in batches] == ["p1", "p2", "p3"]
    assert engine.statistics().tasks["task"].failures == {"loop": 1}


async def test_a_member_that_cancels_itself_beside_one_that_failed_has_failed() -> None:
    class Loop(AgentLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            raise ValueError("the first one")

        async def generate_group(self, group: LiveGroup) -> None:
            await group.run(group.rollouts[0])
            await cancel_nobody()

    recording = RecordingInstrument()
    task = spec(loop=Loop(), starve_after=1, shuffle=False)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
        with fail_after(1000), pytest.raises(Starved):
            await engine.next_batch(1)  # production goes on
    for group, outcome in recording.groups[:2]:
        assert outcome == "loop"
        messages = [s.failure and s.failure.message for s in group.samples]
        assert messages == ["ValueError: the first one", "the group loop cancelled itself"]
    assert engine.statistics().tasks["task"].failures == {"loop": 4}


async def test_of_a_judger() -> None:
    async def judge(sample: Sample) -> float:
        if sample.prompt.uid == "p0" and sample.index == 0:
            await cancel_nobody()
        return 1.0

    controller, recording = ScriptedController(rate=10.0), RecordingInstrument()
    task = spec(judger=judge, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with fail_after(1000):
            batches = [await engine.next_batch(1) for _ in range(2)]
        assert_conserved(engine, committed=controller.committed)
    assert [b.groups[0].prompt.uid for b in batches] == ["p1", "p2"]
    first, second = recording.groups[0][0].samples
    assert first.failure is not None
    assert (first.failure.kind, first.failure.message) == (
        "judge",
        "JudgeError: the judger cancelled itself",
    )
    assert second.status is Status.COMPLETED
    assert second.reward == 1.0


async def test_of_a_judger_of_groups() -> None:
    class Quitter:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            if samples[0].prompt.uid == "p0":
                await cancel_nobody()
            return [1.0 for _ in samples]

    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(judger=Quitter(), shuffle=False)) as engine:
        with fail_after(1000):
            batch = await engine.next_batch(1)
    assert batch.groups[0].prompt.uid == "p1"
    assert engine.statistics().tasks["task"].dropped == {"judge": 1}


async def test_of_a_tool() -> None:
    told: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        with pytest.raises(ToolError) as error:
            await rollout.tool(cancel_nobody)
        told.append(str(error.value))

    async with Engine(ScriptedController(), spec(loop=loop, group_size=1)) as engine:
        await engine.next_batch(1)
    assert told[0] == "tool cancel_nobody cancelled itself"


class Quitting(ScriptedController):
    """Cancels some requests itself."""

    async def generate(self, attempt: Attempt) -> None:
        if attempt.prompt_ids[0] == 1:
            attempt.commit([5], [-1.0])
            await cancel_nobody()
        await super().generate(attempt)


async def test_of_a_controller() -> None:
    controller, recording = Quitting(), RecordingInstrument()
    task = spec(group_size=1, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with fail_after(1000):
            batch = await engine.next_batch(1)
        assert_conserved(engine, committed=controller.committed + 1)
    assert batch.groups[0].prompt.uid == "p1"
    failure = recording.samples[0].failure
    assert failure is not None
    assert failure.kind == "inference"
    assert "the controller cancelled the request itself" in failure.message


class QuittingProbes(ScriptedController):
    """Is down at first, and cancels what is asked meanwhile to find that out."""

    async def generate(self, attempt: Attempt) -> None:
        if anyio.current_time() >= 20:
            await super().generate(attempt)
        elif attempt.max_tokens == 1:
            await cancel_nobody()
        else:
            raise InferenceError("503: down", retryable=True)


async def test_of_a_controller_that_is_probed() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid == "p1":
            await sleep(30)
        await rollout.generate()

    controller = QuittingProbes()
    async with Engine(controller, spec(loop=loop, group_size=1, prompts=prompts(2))) as engine:
        with fail_after(1000):
            batch = await engine.next_batch(2)
    assert len(batch.groups) == 2


async def test_of_what_is_really_cancelled_nothing_fails() -> None:
    async def loop(rollout: Rollout) -> None:
        try:
            await sleep(1000)
        finally:
            await cancel_nobody()  # on its way out

    recording = RecordingInstrument()
    engine = Engine(ScriptedController(), spec(loop=loop), instruments=[recording])
    async with create_task_group() as group:
        async with engine:
            group.start_soon(engine.next_batch, 1)
            await sleep(1)
            group.cancel_scope.cancel()
    ((left, outcome),) = recording.groups
    assert outcome == "waiting"
    assert {sample.status for sample in left.samples} == {Status.ABORTED}


@on_asyncio
async def test_production_that_somebody_else_cancels_ends_loudly() -> None:
    """`task.cancel()` on a task of the engine: nothing would be produced any more, and nobody told."""

    async def cancel_a_producer() -> None:
        await sleep(1)
        (producer,) = [t for t in asyncio.all_tasks() if t.get_name() == "producer task"]
        producer.cancel()

    controller = ScriptedController(lambda _: Reply([5], delay=1e6))
    engine = Engine(controller, spec())
    async with create_task_group() as group:
        with pytest.raises(EngineBroken, match="was cancelled, and not by the engine"):
            async with engine:
                group.start_soon(cancel_a_producer)
                await engine.next_batch(1)
    assert engine.statistics().tasks["task"].waiting == 1


@on_asyncio
@pytest.mark.parametrize("call", ["generate", "tool", "judge"])
async def test_asyncios_own_timeout_in_a_loop_ends_the_call_that_it_is_around(call: str) -> None:
    """It cancels the task without a scope, and takes that back: neither the server nor the tool did it."""

    async def slow(*_: object) -> float:
        await sleep(1000)
        return 0.0

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                match call:
                    case "generate":
                        await rollout.generate()
                    case "tool":
                        await rollout.tool(slow)
                    case _:
                        await rollout.judge()
        rollout.score(1.0)

    controller = ScriptedController(
        lambda attempt: Reply([5], delay=(len(attempt.prompt_ids) - 2) * 1e3)
    )
    task = spec(loop=loop, judger=slow, group_size=1, max_response_tokens=8)
    async with Engine(controller, task) as engine:
        (group,) = (await engine.next_batch(1)).groups
    assert group.rewards == (1.0,)
    assert engine.statistics().tasks["task"].failures == {}
