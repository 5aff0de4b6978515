"""Any loop that keeps to the rules, evicted at any steps, ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from anyio import Event, create_task_group, sleep
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollnest import Context, PauseMode, Prompt, Rollout, Sample, Sampling, TaskSpec
from rollnest.testing import act_at_steps
from rollnest.testing._check_loop import PlayedTask

Op: TypeAlias = tuple[Any, ...]
Backend = Literal["asyncio", "trio"]

tools = st.tuples(st.just("tool"), st.integers(0, 2))
turns = st.tuples(st.just("turn"), st.integers(1, 4))
appends = st.tuples(st.just("append"), st.lists(st.integers(1, 999), max_size=3))
branches = st.lists(st.one_of(tools, turns, appends), min_size=1, max_size=4)
ops = st.one_of(
    tools,
    turns,
    appends,
    st.tuples(st.just("draw")),
    st.tuples(st.just("judge")),
    st.tuples(st.just("rerun"), st.integers(0, 9)),
    st.tuples(st.just("side by side"), st.lists(branches, min_size=2, max_size=3)),
)
programs = st.lists(ops, max_size=6)


async def tool(number: int) -> list[int]:
    await sleep(0.15 * number)
    return [100 + number] * number


async def play(rollout: Rollout, program: Sequence[Op]) -> None:
    """Plays a program; what it does follows from the program and the rollout."""
    world: list[int] = []
    contexts = 0

    async def rerun(number: int) -> int:
        await checkpoint()
        world.append(number)
        return sum(world)

    async def branch(context: Context, branch: Sequence[Op]) -> None:
        for op in branch:
            match op:
                case ("turn", most):
                    await context.generate(max_tokens=most)
                case ("append", ids):
                    context.append(ids)
                case _:
                    context.append(await rollout.tool(tool, op[1]))

    await rollout.generate(max_tokens=2)
    for op in program:
        match op:
            case ("turn", most):
                await rollout.generate(max_tokens=most)
            case ("append", ids):
                rollout.append(ids)
            case ("tool", number):
                rollout.append(await rollout.tool(tool, number))
            case ("draw",):
                rollout.append([rollout.random.randrange(1000)])
            case ("judge",):
                rollout.append([int((await rollout.judge()).score)])
            case ("rerun", number):
                rollout.append([await rollout.tool(rerun, number, replay="rerun")])
            case _:
                async with create_task_group() as group:
                    for part in op[1]:
                        contexts += 1
                        context = rollout.segment([7, contexts])
                        group.start_soon(branch, context, part)


async def judge(sample: Sample) -> float:
    await checkpoint()
    return float(sample.policy_tokens)


@given(
    programs,
    st.lists(st.integers(1, 120), min_size=1, max_size=4, unique=True),
    st.sampled_from(["asyncio", "trio"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_loop_goes_on_from_any_steps(
    program: list[Op], steps: list[int], backend: Backend
) -> None:
    async def loop(rollout: Rollout) -> None:
        await play(rollout, program)

    task = TaskSpec(
        "any",
        [Prompt("p", token_ids=[1, 2])],
        loop=loop,
        judger=judge,
        group_size=1,
        epochs=1,
        sampling=Sampling(4),
    )
    whole = PlayedTask(task)
    act_at_steps(whole.play, {}, backend=backend)
    again = PlayedTask(task)
    events: list[Event] = []

    async def operation() -> None:
        events.extend(Event() for _ in steps)
        await again.play(*[(event, PauseMode.EVICT) for event in events])

    def set_event(number: int) -> Callable[[], None]:
        return lambda: events[number].set()

    actions = {step: set_event(number) for number, step in enumerate(sorted(steps))}
    report = act_at_steps(operation, actions, backend=backend)
    again.check(report)
    assert again.outcome == whole.outcome
    statistics = again.engine.statistics()
    assert statistics.total("restarted") == statistics.total("diverged") == 0
