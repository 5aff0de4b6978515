"""What a review of the core found: each test failed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import create_task_group, fail_after, move_on_after, sleep
from anyio.lowlevel import checkpoint

from rollnest import (
    AsyncStrategy,
    Capabilities,
    Capacity,
    Engine,
    Limits,
    Message,
    Prompt,
    Rollout,
    Sample,
    Sampling,
)
from rollnest._strategies import Production
from rollnest.abc import Attempt, Instrument
from rollnest.errors import EngineBroken, EngineClosed, LoopError, Starved
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
    free_running_threads,
    virtual_backends,
)

from .helpers import in_turn, one_batch, prompts, spec
from .toy_tokenizer import ToyTokenizer

pytestmark = pytest.mark.anyio


async def test_an_exception_group_of_the_users_block_leaves_it_whole() -> None:
    error = ExceptionGroup("mine", [KeyError("one"), ValueError("two")])
    with pytest.raises(ExceptionGroup) as caught:
        async with Engine(ScriptedController(), spec()) as engine:
            await engine.next_batch(1)
            raise error
    assert caught.value is error


async def test_a_warning_turned_into_an_error_does_not_hang_the_exit() -> None:
    begun, release = threading.Event(), threading.Event()

    async def until_begun() -> None:
        while not begun.is_set():  # time can't jump while this runs
            await checkpoint()

    def judge(sample: Sample) -> float:
        begun.set()
        release.wait(20)
        return 1.0

    task = spec(judger=judge, group_size=1, limits=Limits(judge=1.0))
    try:
        with free_running_threads(), fail_after(1000):
            with pytest.raises(RuntimeWarning, match="can't be stopped: judger of"):
                async with Engine(ScriptedController(), task, exit_grace=1.0) as engine:
                    with move_on_after(5):
                        async with create_task_group() as group:
                            group.start_soon(until_begun)
                            await engine.next_batch(1)
    finally:
        release.set()


async def test_a_base_exception_of_a_loop_aborts_the_other_groups() -> None:
    class Halt(BaseException):
        pass

    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid == "p2":
            await sleep(1)
            raise Halt
        await rollout.generate()

    controller = ScriptedController(rate=0.1)
    task = spec(loop=loop, group_size=1, shuffle=False, prompts=prompts(3), epochs=1)
    with pytest.raises(Halt):
        async with Engine(controller, task) as engine:
            await engine.next_batch(3)
    assert engine.statistics().tasks["task"].waiting == 3
    assert_conserved(engine, committed=controller.committed)


async def test_the_books_balance_in_the_step_of_a_redraw() -> None:
    faults: list[AssertionError] = []

    class Auditor(Instrument):
        def group_started(self, task: str, visit: int) -> None:
            try:
                assert_conserved(engine)
            except AssertionError as error:
                faults.append(error)

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=0.0 if attempt.max_tokens == 2 else 3.0)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=2 + rollout.index)

    task = spec(loop=loop, strategy=AsyncStrategy(max_staleness=0, lead=1))
    controller = ScriptedController(script)
    async with Engine(controller, task, batch_size=2, instruments=[Auditor()]) as engine:
        await sleep(1)
        async with engine.paused() as pause:  # the slow members begin anew, with newer weights
            await pause.update_weights({})
        await sleep(5)
        await engine.next_batch()
    assert engine.statistics().total("redrawn") >= 2
    assert faults == []


async def test_a_crash_leaves_the_other_groups_waiting() -> None:
    class Strategy:
        max_staleness = 0
        needs_batch_size = False
        expired = "retry"
        crashes = False

        def room(self, production: Production) -> int:
            if self.crashes:
                raise ZeroDivisionError("a bug")
            return 3 - production.flight

    strategy = Strategy()
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    with pytest.raises(EngineBroken, match="a bug"):
        async with Engine(controller, spec(strategy=strategy)) as engine:
            await sleep(0.05)
            assert engine.statistics().tasks["task"].flight == 3
            strategy.crashes = True
            await engine.next_batch(1)
    figures = engine.statistics().tasks["task"]
    assert figures.dropped == {}
    assert figures.waiting == figures.drawn == 3


async def test_a_loop_that_raises_while_cancelled_stays_alone() -> None:
    async def helper() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("clean-up went wrong")

    async def loop(rollout: Rollout) -> None:
        async with create_task_group() as group:
            group.start_soon(helper)
            await rollout.generate()

    controller = ScriptedController(rate=0.1)
    async with Engine(
        controller, spec(loop=loop, strategy=AsyncStrategy()), batch_size=2
    ) as engine:
        await sleep(1)
    assert_conserved(engine, committed=controller.committed)


async def test_a_judger_that_raises_while_cancelled_stays_alone() -> None:
    async def helper() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("clean-up went wrong")

    async def judge(sample: Sample) -> float:
        async with create_task_group() as group:
            group.start_soon(helper)
            await anyio.sleep_forever()
        return 1.0

    controller = ScriptedController()
    async with Engine(
        controller, spec(judger=judge, strategy=AsyncStrategy()), batch_size=2
    ) as engine:
        await sleep(1)
    assert_conserved(engine, committed=controller.committed)


async def test_contexts_side_by_side_share_one_budget() -> None:
    async def loop(rollout: Rollout) -> None:
        other = rollout.segment([7])
        async with create_task_group() as group:
            group.start_soon(rollout.generate)
            group.start_soon(other.generate)

    controller = ScriptedController(rate=10.0, stop_every=10_000)
    batch, _ = await one_batch(controller, spec(loop=loop, group_size=1, max_response_tokens=10))
    for sample in batch.samples:
        check_sample(sample, max_response_tokens=10)


@pytest.mark.parametrize("sync", [False, True])
async def test_waiting_for_a_judge_is_not_judging(sync: bool) -> None:
    async def judge(sample: Sample) -> float:
        await sleep(0.6)
        return 1.0

    def judge_later(sample: Sample) -> Any:
        return judge(sample)

    task = spec(
        judger=judge_later if sync else judge,
        group_size=4,
        limits=Limits(judge=1.0),
        starve_after=1,
    )
    batch, _ = await one_batch(ScriptedController(), task, capacity=Capacity(judges=1))
    assert [s.reward for s in batch.samples] == [1.0] * 4


async def test_waiting_for_a_tool_slot_is_not_the_tools_time() -> None:
    def tool() -> Any:
        return slow()

    async def slow() -> str:
        await sleep(0.6)
        return "done"

    answers: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        answers.append(await rollout.tool(tool))

    task = spec(loop=loop, group_size=4, limits=Limits(tool=1.0), starve_after=1)
    await one_batch(ScriptedController(), task, capacity=Capacity(tools=1))
    assert answers == ["done"] * 4


@pytest.mark.parametrize(
    "answer", [np.array([1, 2]), ["1", "2"], [1.5], [-1], {"input_ids": [1]}, None]
)
async def test_a_tokenizer_that_answers_nonsense_fails_the_samples_only(answer: Any) -> None:
    class Nonsense(ToyTokenizer):
        def render(
            self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
        ) -> Any:
            return answer

    good = isinstance(answer, np.ndarray)
    task = spec(prompts=["hello", "there"], starve_after=2)
    async with Engine(ScriptedController(), task, tokenizer=Nonsense()) as engine:
        if good:
            await engine.next_batch(1)
        else:
            with pytest.raises(Starved) as caught:
                await engine.next_batch(1)
            assert set(caught.value.reasons) == {"data"}


@pytest.mark.parametrize("where", ["loop", "judge", "controller", "tool"])
async def test_bug_057_an_error_without_a_text(where: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise AttributeError("no response")

    def fail(*args: object) -> Any:
        raise Mute

    async def loop(rollout: Rollout) -> None:
        if where == "tool":
            await rollout.tool(fail)
        if where == "loop":
            raise Mute
        await rollout.generate()

    class Failing(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            if where == "controller":
                raise Mute
            await super().generate(attempt)

    judger = fail if where == "judge" else None
    async with Engine(Failing(), spec(loop=loop, judger=judger, starve_after=1)) as engine:
        with pytest.raises(Starved) as caught:
            await engine.next_batch(1)
    assert set(caught.value.reasons) <= {"loop", "judge", "inference", "tool"}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["judge", "tool"])
async def test_a_function_in_a_thread_that_exits_fails_its_sample_only(
    where: str, error: type[BaseException]
) -> None:
    def leave(*args: object) -> Any:
        raise error("bye")

    async def loop(rollout: Rollout) -> None:
        if where == "tool":
            await rollout.tool(leave)
        await rollout.generate()

    judger = leave if where == "judge" else None
    async with Engine(
        ScriptedController(), spec(loop=loop, judger=judger, starve_after=1)
    ) as engine:
        with pytest.raises(Starved, match="bye") as caught:
            await engine.next_batch(1)
    assert set(caught.value.reasons) == {where}


async def test_the_books_balance_in_mid_stream() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000, stream=True)
    async with (
        Engine(controller, spec()) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(0.55)
        assert controller.committed > 0
        assert_conserved(engine, committed=controller.committed)
        group.cancel_scope.cancel()


async def test_a_consumer_elsewhere_hears_that_the_block_was_left() -> None:
    seen: list[BaseException] = []

    async def consume(engine: Engine) -> None:
        try:
            await engine.next_batch(1, wait_in_pause=True)
        except Exception as error:
            seen.append(error)

    async def loop(rollout: Rollout) -> None:
        await anyio.sleep_forever()

    async with create_task_group() as group:
        async with Engine(ScriptedController(), spec(loop=loop)) as engine:
            group.start_soon(consume, engine)
            await sleep(1)
    assert [type(e) for e in seen] == [EngineClosed]


@pytest.mark.parametrize("anyio_backend", [virtual_backends()[0]()], ids=["asyncio"])
async def test_a_native_cancellation_of_resume_does_not_close_the_gate_for_ever(
    anyio_backend: object,
) -> None:
    class Slow(ScriptedController):
        async def resume(self) -> None:
            await sleep(0.5)
            await super().resume()

    async with Engine(Slow(), spec()) as engine:

        async def update() -> None:
            async with engine.paused():
                pass

        task = asyncio.get_running_loop().create_task(update())
        await sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await engine.next_batch(1)) == 1


async def test_a_timeout_of_the_tools_own_is_no_limit_of_ours() -> None:
    def tool() -> str:
        raise TimeoutError("connection timed out")

    said: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        try:
            await rollout.tool(tool)
        except Exception as error:
            said.append(str(error))

    await one_batch(ScriptedController(), spec(loop=loop, group_size=1))
    assert "connection timed out" in said[0]


async def test_a_timeout_of_the_judgers_own_is_no_limit_of_ours() -> None:
    def judge(sample: Sample) -> float:
        raise TimeoutError("connection timed out")

    async with Engine(ScriptedController(), spec(judger=judge, starve_after=1)) as engine:
        with pytest.raises(Starved, match="connection timed out"):
            await engine.next_batch(1)


async def test_a_timeout_of_the_controllers_own_is_no_limit_of_ours() -> None:
    class Failing(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            raise TimeoutError("read timed out")

    async with Engine(Failing(), spec(starve_after=1)) as engine:
        with pytest.raises(Starved, match="read timed out"):
            await engine.next_batch(1)


async def test_a_samples_limit_is_named() -> None:
    task = spec(starve_after=1, limits=Limits(sample=2.0))
    async with Engine(ScriptedController(rate=0.1), task) as engine:
        with pytest.raises(Starved, match=r"2\.0 s"):
            await engine.next_batch(1)


async def test_published_weights_can_be_used() -> None:
    async with Engine(ScriptedController(), spec(starve_after=1)) as engine:
        async with engine.paused() as pause:
            pause.published(3)
        batch = await engine.next_batch(1)
    assert {s.oldest_version for s in batch.samples} == {3}


async def test_a_turns_own_sampling_must_be_trainable_too() -> None:
    raw = Capabilities(vocab_size=1000, max_context=50, logprobs="raw", sampling={"temperature"})

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(sampling=Sampling(5, temperature=0.5))

    async with Engine(
        ScriptedController(capabilities=raw), spec(loop=loop, starve_after=1)
    ) as engine:
        with pytest.raises(Starved, match="raw logprobs"):
            await engine.next_batch(1)


async def test_a_turns_own_sampling_is_not_greedy() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(sampling=Sampling(5, temperature=0.0))

    async with Engine(ScriptedController(), spec(loop=loop, starve_after=1)) as engine:
        with pytest.raises(Starved, match="temperature"):
            await engine.next_batch(1)


async def test_min_tokens_is_never_above_the_cap_that_is_sent() -> None:
    seen: list[tuple[int, int]] = []

    def script(attempt: Attempt) -> Reply:
        seen.append((attempt.sampling.min_tokens, attempt.max_tokens))
        return Reply([5, 6, 7, 8])

    task = spec(group_size=1, max_response_tokens=3, sampling=Sampling(20, min_tokens=5))
    await one_batch(ScriptedController(script), task)
    assert all(least <= most for least, most in seen)


async def test_a_turn_without_room_is_within_its_segment() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=4)
        rollout.append([40] * 6)
        turn = await rollout.generate()
        assert len(turn) == 0

    controller = ScriptedController(stop_every=10_000)
    batch, _ = await one_batch(controller, spec(loop=loop, group_size=1, max_response_tokens=10))
    for sample in batch.samples:
        check_sample(sample)


async def test_a_loops_own_timeout_keeps_the_sample_valid() -> None:
    async def loop(rollout: Rollout) -> None:
        with move_on_after(0.5):
            await rollout.generate()

    controller = ScriptedController(rate=10.0, stop_every=10_000, stream=True)
    batch, _ = await one_batch(controller, spec(loop=loop, group_size=1))
    for sample in batch.samples:
        check_sample(sample)


async def test_a_frozen_rollout_generates_no_more() -> None:
    rollouts: dict[int, Rollout] = {}
    said: list[str] = []

    async def loop(rollout: Rollout) -> None:
        rollouts[rollout.index] = rollout
        await rollout.generate()
        if rollout.index == 1:
            await sleep(5)  # the other one has ended
            try:
                await rollouts[0].generate()
            except LoopError as error:
                said.append(str(error))

    controller = ScriptedController()
    _, engine = await one_batch(controller, spec(loop=loop, group_size=2))
    assert len(said) == 1
    assert_conserved(engine, committed=controller.committed)


async def test_a_turn_that_outlives_its_sample_loses_no_token() -> None:
    rollouts: dict[int, Rollout] = {}

    async def loop(rollout: Rollout) -> None:
        rollouts[rollout.index] = rollout
        await rollout.generate()
        await sleep(1)
        if rollout.index == 1:
            with suppress(Exception):
                await rollouts[0].generate()
        else:
            await sleep(0.5)

    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(loop=loop, group_size=2, sampling=Sampling(3))
    _, engine = await one_batch(controller, task)
    assert_conserved(engine, committed=controller.committed)


async def test_a_decoder_that_fails_on_a_partial_loses_no_token() -> None:
    class Fragile(ToyTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            if len(ids) > 12:
                raise ValueError("half a character")
            return super().decode(ids)

    controller = ScriptedController(rate=10.0, stop_every=10_000)
    task = spec(group_size=1, sampling=Sampling(20, stop="END"), starve_after=1)
    async with (
        Engine(controller, task, tokenizer=Fragile()) as engine,
        create_task_group() as group,
    ):
        group.start_soon(_next, engine)
        await sleep(0.5)
        async with engine.paused():
            pass
        await sleep(10)
        group.cancel_scope.cancel()
    assert_conserved(engine, committed=controller.committed)


async def _next(engine: Engine) -> None:
    try:
        await engine.next_batch(1)
    except Starved:
        pass


async def test_context_outside_the_vocabulary_is_refused() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([5000])
        await rollout.generate()

    controller = ScriptedController()
    async with Engine(controller, spec(loop=loop, starve_after=1)) as engine:
        with pytest.raises(Starved, match="5000"):
            await engine.next_batch(1)
    assert not any(5000 in ids for ids in controller.prompts)


async def test_messages_appended_twice_in_a_row() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "tool", "content": "A"}])
        rollout.append_messages([{"role": "tool", "content": "B"}])
        await rollout.generate()

    tokenizer = ToyTokenizer({40: "A", 41: "B", 2: "q"}, header=[4])
    controller = ScriptedController(in_turn(Reply([5, 9])))
    task = spec(prompts=["q"], loop=loop, group_size=1, starve_after=1)
    async with Engine(controller, task, tokenizer=tokenizer) as engine:
        with pytest.raises(Starved, match="append_messages"):
            await engine.next_batch(1)


async def test_chat_refuses_the_assistants_last_word() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.chat(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        )

    task = spec(prompts=["q"], loop=loop, group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task, tokenizer=ToyTokenizer()) as engine:
        with pytest.raises(Starved, match="assistant"):
            await engine.next_batch(1)


async def test_chat_with_the_prompts_tools_attaches_to_the_prompts_context() -> None:
    tools = [{"type": "function"}]

    async def loop(rollout: Rollout) -> None:
        await rollout.chat(rollout.prompt.messages or (), tools=tools)

    prompt = Prompt("p", messages=[{"role": "user", "content": "q"}], tools=tools)
    task = spec(prompts=[prompt], loop=loop, group_size=1)
    batch, _ = await one_batch(ScriptedController(), task, tokenizer=ToyTokenizer())
    (sample,) = batch.samples
    assert len(sample.segments) == 1


async def test_a_bad_instrument_is_taken_out_altogether() -> None:
    calls: list[str] = []

    class Bad(Instrument):
        def turn_started(self, attempt: Attempt) -> None:
            calls.append("turn_started")
            raise RuntimeError("bad")

        def sample_ended(self, sample: Sample) -> None:
            calls.append("sample_ended")

    async with Engine(ScriptedController(), spec(), instruments=[Bad()]) as engine:
        await engine.next_batch(1)
    assert calls == ["turn_started"]


async def test_only_turns_with_a_partial_count_as_resumed() -> None:
    controller = ScriptedController(in_turn(Reply([5, 9], delay=100.0)))
    task = spec(group_size=1)
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(1)
        async with engine.paused():
            pass
    assert engine.statistics().total("resumed_turns") == 0


async def test_a_controller_that_loses_its_capabilities() -> None:
    class Forgetful(ScriptedController):
        gone = False

        @property
        def capabilities(self) -> Capabilities:
            if self.gone:
                raise OSError("connection lost")
            return super().capabilities

    controller = Forgetful(rate=10.0)
    async with Engine(controller, spec(starve_after=1)) as engine, create_task_group() as group:
        group.start_soon(_next, engine)
        await sleep(0.05)
        controller.gone = True
        await sleep(10)
        group.cancel_scope.cancel()
    assert_conserved(engine, committed=controller.committed)
    assert engine.statistics().total("flight") == 0


async def test_tokens_of_the_future_are_refused() -> None:
    controller = ScriptedController(in_turn(Reply([5, 9], versions=[7, 7])))
    async with Engine(controller, spec(starve_after=1)) as engine:
        with pytest.raises(Starved, match="version"):
            await engine.next_batch(1)


@pytest.mark.parametrize("anyio_backend", [virtual_backends()[0]()], ids=["asyncio"])
async def test_a_loop_with_asyncios_own_timeout(anyio_backend: object) -> None:
    async def loop(rollout: Rollout) -> None:
        try:
            async with asyncio.timeout(0.5):
                await rollout.generate()
        except TimeoutError:
            rollout.fail("took too long")

    controller = ScriptedController(rate=10.0, stop_every=10_000, stream=True)
    async with Engine(controller, spec(loop=loop, starve_after=1)) as engine:
        with pytest.raises(Starved, match="took too long"):
            await engine.next_batch(1)
    assert_conserved(engine, committed=controller.committed)


def test_shares_sum_to_the_batch_after_tasks_have_gone() -> None:
    from fractions import Fraction

    from rollnest._allocation import Allocation

    allocation = Allocation({"a": 1.0, "b": 1.0, "c": 1.0})
    allocation._owed = {"a": Fraction(-6, 5), "b": Fraction(-6, 5), "c": Fraction(12, 5)}
    assert sum(allocation.plan(5, {"a", "b"}).groups.values()) == 5
