"""`check_loop`: loops that can be interrupted at every step, and loops that can not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio import create_task_group, sleep
from anyio.lowlevel import checkpoint

from rollnest import (
    AgentLoop,
    Context,
    Message,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    SingleTurnLoop,
    ToolLoop,
)
from rollnest.abc import Attempt
from rollnest.errors import JudgeError, ToolError
from rollnest.testing import LoopReport, Reply, check_loop

from .toy_tokenizer import EOS, ToyTokenizer

EVICT = (PauseMode.EVICT,)

Loop = Callable[[Rollout], Awaitable[None]]


async def look_up(number: int) -> int:
    await sleep(0.25)
    return 500 + number


async def tools_between_turns(rollout: Rollout) -> None:
    for number in range(3):
        await rollout.generate()
        rollout.append([await rollout.tool(look_up, number)])


async def tools_side_by_side(rollout: Rollout) -> None:
    for number in range(2):
        answers: dict[int, int] = {}

        async def ask(which: int, answers: dict[int, int] = answers) -> None:
            answers[which] = await rollout.tool(look_up, which)

        await rollout.generate()
        async with create_task_group() as group:
            for which in range(3):
                group.start_soon(ask, 10 * number + which)
        rollout.append([answers[which] for which in sorted(answers)])
    await rollout.generate()


async def segments_side_by_side(rollout: Rollout) -> None:
    async def sub_agent(context: Context, turns: int) -> None:
        for number in range(turns):
            await context.generate(max_tokens=2 + number)
            context.append([await rollout.tool(look_up, 10 * turns + number)])

    await rollout.generate()
    async with create_task_group() as group:
        for turns in (1, 2, 3):
            group.start_soon(sub_agent, rollout.segment([7, turns]), turns)
    await rollout.generate()


async def segments_opened_by_their_tasks(rollout: Rollout) -> None:
    async def sub_agent(number: int) -> None:
        context = rollout.segment([7, number])
        for _ in range(2):
            await context.generate(max_tokens=3)
            context.append([await rollout.tool(look_up, number)])

    async with create_task_group() as group:
        for number in range(3):
            group.start_soon(sub_agent, number)


async def draws(rollout: Rollout) -> None:
    for _ in range(3):
        await rollout.generate(max_tokens=rollout.random.randint(1, 4))
        rollout.append([rollout.random.randrange(600)])
        if rollout.random.random() < 0.5:
            rollout.append([await rollout.tool(look_up, rollout.random.randrange(9))])


async def judges_itself(rollout: Rollout) -> None:
    await rollout.generate()
    try:
        verdict = await rollout.judge()
    except JudgeError:
        rollout.append([1])
    else:
        rollout.append([2 + int(verdict.score)])
    await rollout.generate()
    rollout.append([int((await rollout.judge()).score)])
    await rollout.generate()


async def broken(number: int) -> int:
    await sleep(0.25)
    raise KeyError(number)


async def tools_fail(rollout: Rollout) -> None:
    for number in range(2):
        await rollout.generate()
        try:
            await rollout.tool(broken, number)
        except ToolError as error:
            rollout.append([len(str(error))])
    await rollout.generate()


async def keeps_a_state(rollout: Rollout) -> None:
    world: list[int] = []

    async def step(number: int) -> list[int]:
        await sleep(0.25)
        world.append(number)
        return world

    for number in range(3):
        await rollout.generate()
        rollout.append([sum(await rollout.tool(step, number, replay="rerun"))])
    rollout.score(float(len(world)))


async def times_out(rollout: Rollout) -> None:
    await rollout.generate(max_tokens=2)
    with anyio.move_on_after(0.15):
        await rollout.tool(look_up, 1)
    await rollout.generate(max_tokens=2)
    rollout.finish("enough")


async def in_threads(rollout: Rollout) -> None:
    def compute(number: int) -> int:
        return 2 * number

    for number in range(3):
        await rollout.generate(max_tokens=2)
        rollout.append([await rollout.tool(compute, number)])


async def until_the_budget_ends(rollout: Rollout) -> None:
    while not rollout.done:
        await rollout.generate(max_tokens=max(1, rollout.remaining // 2))
        rollout.append([5])


async def in_turn_within_a_budget(rollout: Rollout) -> None:
    await rollout.generate(max_tokens=max(1, rollout.remaining // 3))
    rollout.append([5, 6])
    other = rollout.segment([8])
    await other.generate(max_tokens=max(1, other.remaining // 3))
    other.append([7])
    await rollout.generate(max_tokens=max(1, rollout.remaining // 2))
    await other.generate()


async def judge_all(sample: Sample) -> float:
    await checkpoint()
    return float(sample.policy_tokens % 5)


async def judge(sample: Sample) -> float:
    await checkpoint()
    if sample.policy_tokens % 4 == 1:
        raise ValueError("it says no")
    return float(sample.policy_tokens % 5)


LOOPS: list[Loop] = [
    tools_side_by_side,
    segments_side_by_side,
    segments_opened_by_their_tasks,
    draws,
    judges_itself,
    tools_fail,
    keeps_a_state,
    times_out,
    in_threads,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_go_on_from_the_steps_that_they_are_evicted_at(loop: Loop) -> None:
    judger = judge if loop is judges_itself else None
    report = check_loop(loop, judger=judger, sampling=Sampling(4), modes=EVICT, every=3)
    assert report.evicted > 20
    assert report.replayed_turns > 5


def test_a_tool_loop_survives_everything_at_every_step() -> None:
    report = check_loop(tools_between_turns, sampling=Sampling(4), judger=judge_all)
    assert set(report.paused) == set(PauseMode)
    assert min(report.paused.values()) > 100
    assert report.cancelled > 100
    assert report.evicted > 100
    assert report.replayed_turns > 100
    assert report.resumed_turns > 20
    assert report.tool_calls == 3
    assert report.restored > 100
    others = report.cancelled + 2 * report.restored + 4 + len(PauseMode) * 2 + 2
    # The others were ended before there was anything to save.
    assert 0 < report.runs - sum(report.paused.values()) - others < 20


@pytest.mark.parametrize("loop", [until_the_budget_ends, in_turn_within_a_budget])
def test_loops_that_look_at_their_budget(loop: Loop) -> None:
    report = check_loop(loop, max_response_tokens=20, modes=EVICT, every=2)
    assert report.replayed_turns > 20


# With a tokenizer

TOKENIZER = ToyTokenizer({40: "R", 41: "S", 42: "T"}, header=[8])
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": %d}}</tool_call>'


def conversation(*turns: str) -> Callable[[Attempt], Reply]:
    """Says one thing after the other, by how many turns have ended before."""

    def script(attempt: Attempt) -> Reply:
        ended = attempt.prompt_ids.tolist().count(EOS)
        return Reply([*TOKENIZER.encode(turns[ended]), EOS])

    return script


def test_the_tool_loop() -> None:
    called: list[int] = []

    async def add(a: int, b: int) -> int:
        called.append(b)
        await sleep(0.25)
        return a + b

    report = check_loop(
        ToolLoop([add]),
        ["q"],
        script=conversation(CALL % 2, CALL % 3, "5"),
        tokenizer=TOKENIZER,
        sampling=Sampling(200),
        modes=EVICT,
        every=13,
    )
    assert report.tool_calls == 2
    assert report.replayed_turns > 10


async def chats(rollout: Rollout) -> None:
    messages: list[Message] = list(rollout.prompt.messages or ())
    for question in ("R", "S"):
        turn = await rollout.chat(messages)
        messages += [turn.message, {"role": "user", "content": question}]
    await rollout.chat(messages)
    await rollout.chat([{"role": "user", "content": "T"}])


async def appends_messages(rollout: Rollout) -> None:
    for question in ("R", "S"):
        await rollout.generate()
        rollout.append_messages([{"role": "user", "content": question}])
    await rollout.generate()


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("loop", [chats, appends_messages])
def test_conversations(loop: Loop, rewrites: bool) -> None:
    tokenizer = ToyTokenizer({40: "R", 41: "S", 42: "T"}, header=[8], rewrites=rewrites)
    report = check_loop(
        loop,
        ["q"],
        script=conversation("abc", "de", "f", "g"),
        tokenizer=tokenizer,
        modes=EVICT,
        every=3,
    )
    assert report.replayed_turns > 5


# Loops that can't be interrupted


def failure_of(loop: Loop | AgentLoop, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check_loop(loop, **options)
    return str(caught.value)


def test_a_loop_that_draws_from_the_random_module_is_caught() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([random.randrange(1000)])
        await rollout.generate()

    said = failure_of(loop)
    assert "an uninterrupted run on asyncio after another" in said
    assert "follows from something else than its rollout" in said
    assert "id 6 of context 0 is" in said


def test_a_loop_that_reads_a_clock_is_caught() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([int(anyio.current_time() * 10)])
        await rollout.generate()

    assert "EVICT at step" in failure_of(loop)


def test_a_loop_with_a_side_effect_of_its_own_is_caught() -> None:
    numbers = itertools.count()

    async def loop(rollout: Rollout) -> None:
        rollout.append([next(numbers)])
        await rollout.generate()

    assert "id 0 of context 0 is 1, not 0" in failure_of(loop)


def test_a_tool_that_does_not_do_the_same_again_is_caught() -> None:
    lives = {"at": -1.0}

    async def loop(rollout: Rollout) -> None:
        async def age() -> bool:
            return anyio.current_time() < 0.35

        await rollout.tool(age, replay="rerun")
        await rollout.generate()

    assert "a tool did not do the same again" in failure_of(loop, modes=EVICT)
    assert lives


def test_a_loop_that_ends_because_it_was_interrupted_is_caught() -> None:
    async def loop(rollout: Rollout) -> None:
        try:
            await rollout.generate()
        except BaseException:
            rollout.finish("interrupted")

    assert "EVICT at step" in failure_of(loop, modes=EVICT)


def test_a_loop_that_fails_is_told_with_its_error() -> None:
    async def loop(rollout: Rollout) -> None:
        raise KeyError("mine")

    said = failure_of(loop)
    assert "no sample completed" in said
    assert "KeyError: 'mine'" in said


def test_a_loop_that_never_ends_is_caught() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await anyio.sleep_forever()

    assert "an uninterrupted run on asyncio: TimeoutError" in failure_of(loop)


def test_options_of_check_loop() -> None:
    assert set(check_loop(SingleTurnLoop(), backends=["trio"], modes=[]).steps) == {"trio"}
    report = check_loop(SingleTurnLoop(), every=5, modes=[PauseMode.WAIT])
    assert isinstance(report, LoopReport)
    assert set(report.paused) == {PauseMode.WAIT}
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        check_loop(SingleTurnLoop(), every=0)
