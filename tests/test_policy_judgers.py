"""Judgers that ask the policy which is trained: through the gate, like turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from anyio import create_task_group, current_time, fail_after, sleep

from rollnest import (
    AsyncStrategy,
    Attempt,
    Capacity,
    ComposedJudger,
    Engine,
    Limits,
    PauseMode,
    Policy,
    Rollout,
    Sample,
    Sampling,
    Status,
    Verdict,
    current_policy,
)
from rollnest.errors import InferenceError, JudgeError, UnsupportedSampling
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    cancel_at_step,
)

from .helpers import prompts, spec
from .toy_tokenizer import ToyTokenizer

anyio_only = pytest.mark.anyio

JUDGE_ID = 777


class AsksPolicy:
    """Has the policy continue the answer, and scores how many tokens it brought."""

    uses_policy = True

    def __init__(self, max_tokens: int = 10) -> None:
        self.sampling = Sampling(max_tokens, temperature=0.0)
        self.answers: list[list[int]] = []

    async def judge(self, sample: Sample) -> Verdict:
        ids = [JUDGE_ID, *sample.turns[-1].ids]
        turn = await current_policy().generate(ids, sampling=self.sampling)
        self.answers.append(turn.ids.tolist())
        return Verdict(float(len(turn)), details={"attempts": turn.attempts})


def server(**options: Any) -> ScriptedController:
    defaults: dict[str, Any] = {"rate": 10.0, "stop_every": 10**9, "stream": True}
    return ScriptedController(**(defaults | options))


def settled(engine: Engine, controller: ScriptedController) -> None:
    assert not controller.open
    assert controller.while_paused == 0
    assert engine.statistics().total("flight") == 0
    assert_conserved(engine, committed=controller.committed)


async def judged_in_the_loop(rollout: Rollout) -> None:
    await rollout.generate(max_tokens=3)
    await rollout.judge()
    await rollout.generate(max_tokens=3)


@anyio_only
@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("composed", [False, True])
async def test_with_one_place_of_everything_nothing_waits_for_ever(
    in_loop: bool, composed: bool
) -> None:
    controller, judger = server(), AsksPolicy()
    options: dict[str, Any] = {"loop": judged_in_the_loop} if in_loop else {}
    task = spec(
        judger=ComposedJudger({"one": judger, "two": judger}) if composed else judger,
        group_size=4,
        strategy=AsyncStrategy(lead=2),
        sampling=Sampling(5),
        **options,
    )
    engine = Engine(
        controller, task, batch_size=2, capacity=Capacity(turns=1, judges=1, groups=1, tools=1)
    )
    async with engine:
        with fail_after(600):
            batch = await engine.next_batch(2)
    assert all(sample.status is Status.COMPLETED for sample in batch.samples)
    assert {sample.reward for sample in batch.samples} == {20.0 if composed else 10.0}
    assert engine.statistics().judge_tokens == sum(map(len, judger.answers))
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP])
async def test_a_judgers_request_comes_to_rest_in_a_pause_and_goes_on(mode: PauseMode) -> None:
    controller, judger = server(), AsksPolicy(20)
    task = spec(
        judger=judger,
        group_size=2,
        prompts=prompts(1),
        epochs=1,
        sampling=Sampling(5),
        strategy=AsyncStrategy(max_staleness=1),
    )
    async with Engine(controller, task, batch_size=1) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 1)
            await sleep(1.05)
            assert [a.attempt.prompt_ids[0] for a in controller.open.values()] == [JUDGE_ID] * 2
            async with engine.paused(mode, grace=0.5) as pause:
                made = controller.sampled
                await sleep(100)
                assert controller.sampled == made
                assert bool(controller.open) is (mode is PauseMode.KEEP)
                await pause.update_weights({})
    assert [len(answer) for answer in judger.answers] == [20, 20]
    assert engine.statistics().judge_tokens == 40
    if mode is not PauseMode.KEEP:
        again = [ids for ids in controller.prompts if ids[0] == JUDGE_ID]
        assert len(again) == 4
        assert len({len(ids) for ids in again}) == 2  # two go on from what they had
    settled(engine, controller)


@anyio_only
async def test_eviction_ends_a_judgers_request_with_its_group() -> None:
    controller, judger = server(), AsksPolicy(20)
    task = spec(judger=judger, group_size=2, prompts=prompts(1), epochs=1, sampling=Sampling(5))
    async with Engine(controller, task) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 1)
            await sleep(1.05)
            before = current_time()
            async with engine.paused(PauseMode.EVICT, grace=5.0) as pause:
                assert current_time() - before < 1.0
                assert not controller.open
                await pause.update_weights({})
    assert [len(answer) for answer in judger.answers] == [20, 20]
    assert engine.statistics().judge_tokens > 40
    settled(engine, controller)


@anyio_only
async def test_a_judger_waits_for_a_server_that_is_down() -> None:
    down_until = 100.0

    def script(attempt: Attempt) -> Reply:
        if attempt.prompt_ids[0] == JUDGE_ID and current_time() < down_until:
            return Reply([], error=InferenceError("503", retryable=True))
        if current_time() < down_until and current_time() > 1:
            return Reply([], error=InferenceError("503", retryable=True))
        return Reply([5, 0], delay=0.5)

    controller, judger = ScriptedController(script), AsksPolicy()
    task = spec(judger=judger, group_size=8)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    assert len(batch) == 1
    assert engine.statistics().outages == 1
    assert {sample.reward for sample in batch.samples} == {2.0}
    settled(engine, controller)


@anyio_only
async def test_time_in_a_pause_is_not_counted_as_judging() -> None:
    controller, judger = server(), AsksPolicy(20)
    task = spec(judger=judger, group_size=1, sampling=Sampling(5), limits=Limits(judge=5.0))
    async with Engine(controller, task) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 1)
            await sleep(1.0)
            async with engine.paused():
                await sleep(100)
    assert engine.statistics().tasks["task"].dropped == {}
    assert len(judger.answers) == 1


@anyio_only
async def test_a_judgers_limit_cuts_its_request() -> None:
    controller, recording = server(), RecordingInstrument()
    task = spec(
        judger=AsksPolicy(200),
        group_size=1,
        prompts=prompts(1),
        epochs=1,
        limits=Limits(judge=5.0),
        sampling=Sampling(5),
    )
    async with Engine(controller, task, instruments=[recording]) as engine:
        async for _ in engine.batches(1):
            pass
    (sample,) = recording.samples
    assert sample.failure is not None
    assert sample.failure.message == "JudgeError: the judger took over 5.0 s"
    settled(engine, controller)


@anyio_only
async def test_messages_and_text_are_rendered_by_the_engines_tokenizer() -> None:
    tokenizer = ToyTokenizer()
    asked: list[list[int]] = []

    class Asks:
        uses_policy = True

        async def judge(self, sample: Sample) -> float:
            policy = current_policy()
            assert policy.tokenizer is tokenizer
            assert policy.controller is controller
            sampling = Sampling(4)
            first = await policy.generate("good?", sampling=sampling)
            second = await policy.generate(
                [{"role": "user", "content": "good?"}], sampling=sampling
            )
            assert first.text is not None
            assert second.text is not None
            return 1.0

    def script(attempt: Attempt) -> Reply:
        asked.append(attempt.prompt_ids.tolist())
        return Reply([40, 41])

    controller = ScriptedController(script)
    async with Engine(controller, spec(judger=Asks(), group_size=1), tokenizer=tokenizer) as engine:
        await engine.next_batch(1)
    rendered = tokenizer.render([{"role": "user", "content": "good?"}])
    assert asked[1:3] == [rendered, rendered]


@anyio_only
async def test_what_can_not_be_asked_fails_the_sample_with_its_cause() -> None:
    async def failure_of(judge: Any, *, uses_policy: bool = True) -> str:
        recording = RecordingInstrument()

        async def judger(sample: Sample) -> float:
            return float(len(await judge(current_policy())))

        judger.uses_policy = uses_policy  # type: ignore[attr-defined]
        task = spec(judger=judger, group_size=1, prompts=prompts(1), epochs=1)
        async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
            async for _ in engine.batches(1):
                pass
        (sample,) = recording.samples
        assert sample.failure is not None
        assert sample.failure.kind == "judge"
        return sample.failure.message

    async def nothing(policy: Policy) -> Any:
        return await policy.generate([], sampling=Sampling(3))

    async def text(policy: Policy) -> Any:
        return await policy.generate("hello", sampling=Sampling(3))

    async def too_long(policy: Policy) -> Any:
        return await policy.generate([5] * 5000, sampling=Sampling(3))

    async def unknown(policy: Policy) -> Any:
        return await policy.generate([5000], sampling=Sampling(3))

    assert "asks the policy nothing: []" in await failure_of(nothing)
    assert "needs the engine to have a tokenizer" in await failure_of(text)
    assert "leaves no room in a context of 4096" in await failure_of(too_long)
    assert "id 5000 is outside the vocabulary of 1000" in await failure_of(unknown)
    assert "outside of a judger that says uses_policy = True" in await failure_of(
        text, uses_policy=False
    )


@anyio_only
async def test_outside_of_a_judger_there_is_no_policy_to_ask() -> None:
    with pytest.raises(JudgeError, match="outside of a judger"):
        current_policy()
    seen: list[Exception] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.judge()
        try:
            current_policy()
        except JudgeError as error:
            seen.append(error)

    task = spec(judger=AsksPolicy(), loop=loop, group_size=1)
    async with Engine(server(), task) as engine:
        await engine.next_batch(1)
    assert len(seen) >= 1


@anyio_only
async def test_sampling_that_the_controller_refuses_fails_the_sample() -> None:
    class Refuses(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            if attempt.prompt_ids[0] == JUDGE_ID:
                raise UnsupportedSampling("no greedy decoding here")
            await super().generate(attempt)

    recording = RecordingInstrument()
    task = spec(judger=AsksPolicy(), group_size=1, prompts=prompts(1), epochs=1)
    async with Engine(Refuses(), task, instruments=[recording]) as engine:
        async for _ in engine.batches(1):
            pass
    (sample,) = recording.samples
    assert sample.failure is not None
    assert "no greedy decoding here" in sample.failure.message


@anyio_only
async def test_a_judger_of_groups_asks_the_policy_too_and_so_does_one_of_an_evaluation() -> None:
    class Ranks:
        uses_policy = True

        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            ids = [JUDGE_ID, *(sample.index for sample in samples)]
            turn = await current_policy().generate(ids, sampling=Sampling(len(samples)))
            return [float(i) for i in range(len(turn))]

    controller = server()
    task = spec(judger=Ranks(), group_size=3, prompts=prompts(4), sampling=Sampling(5))
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
        assert batch.groups[0].rewards == (0.0, 1.0, 2.0)
        result = await engine.evaluate("task", limit=2)
        assert result.score == 1.0
    assert engine.statistics().judge_tokens == 3 * 3
    settled(engine, controller)


WAYS: list[tuple[Literal["asyncio", "trio"], bool]] = [
    ("asyncio", False),
    ("asyncio", True),
    ("trio", False),
]


@pytest.mark.parametrize(("backend", "native"), WAYS, ids=["asyncio", "asyncio-native", "trio"])
def test_cancelled_at_every_step(backend: Literal["asyncio", "trio"], native: bool) -> None:
    step = 0
    while True:
        step += 1
        controller = server()
        task = spec(
            judger=AsksPolicy(3), group_size=2, sampling=Sampling(3), strategy=AsyncStrategy(lead=1)
        )
        engine = Engine(controller, task, batch_size=1, capacity=Capacity(turns=1, judges=1))
        entered = False

        async def operation() -> None:
            nonlocal entered
            async with engine:  # noqa: B023
                entered = True
                await sleep(1.0)
                async with engine.paused():  # noqa: B023
                    await sleep(1.0)
                await engine.next_batch()  # noqa: B023

        report = cancel_at_step(operation, step, backend=backend, native=native)
        where = f"step {step}: {report}"
        assert report.tasks_left == 0, where
        assert not controller.open, where
        assert controller.log == [] or controller.log[-1] == ("exit", 0), where
        if entered:
            settled(engine, controller)
        if not report.cancelled:
            break
    assert step > 60
