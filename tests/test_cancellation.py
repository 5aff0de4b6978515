"""The task that holds the engine is cancelled at every scheduler step of a small run, in four states.

Afterwards the table balances, no task and no thread is left, and the controller has no open request.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Engine, PauseMode, Sample, Sampling, TaskSpec
from rollnest.testing import ScriptedController

from .helpers import cancelled_at_every_step, each_way, prompts

State = Callable[[Engine], Awaitable[object]]


async def judge(sample: Sample) -> float:
    await checkpoint()
    return 1.0


async def hold() -> None:
    for _ in range(60):
        await checkpoint()


async def idle(engine: Engine) -> None:
    await engine.next_batch()
    await hold()


async def producing(engine: Engine) -> None:
    for _ in range(3):
        await engine.next_batch()


async def paused(engine: Engine) -> None:
    await anyio.sleep(0.25)
    async with engine.paused():
        await hold()
    await engine.next_batch()


def pausing(mode: PauseMode) -> State:
    """A pause in a mode, with a turn in flight, a judger at work and a group that is ready."""

    async def paused(engine: Engine) -> None:
        await anyio.sleep(0.25)
        async with engine.paused(mode) as pause:
            for _ in range(5):
                await checkpoint()
            await pause.update_weights({})
        await engine.next_batch()

    paused.__name__ = f"paused with {mode.name}"
    return paused


async def released(engine: Engine) -> None:
    await anyio.sleep(0.25)
    async with engine.paused(PauseMode.EVICT, release=("kv", "weights")) as pause:
        await pause.reload("weights")
        await pause.update_weights({})
    await engine.next_batch()


async def updating(engine: Engine) -> None:
    await anyio.sleep(0.25)
    async with engine.paused() as pause:
        await pause.update_weights(hold)
    await engine.next_batch()


@pytest.mark.parametrize(
    "state",
    [idle, producing, paused, updating, released, *map(pausing, PauseMode)],
    ids=lambda state: state.__name__,
)
@each_way
def test_cancelled_at_every_step(
    state: State,
    backend: Literal["asyncio", "trio"],
    native: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make() -> tuple[Engine, ScriptedController]:
        controller = ScriptedController(rate=10.0)
        task = TaskSpec(
            "task",
            prompts(9),
            judger=judge,
            group_size=2,
            sampling=Sampling(5),
            strategy=AsyncStrategy(lead=0.5),
        )
        return Engine(controller, task, batch_size=2), controller

    steps = cancelled_at_every_step(make, state, backend, native, at_least=60)
    with capsys.disabled():
        way = f"{backend}{' native' if native else ''}"
        sys.stdout.write(f"\n{state.__name__} on {way}: cancelled at each of {steps - 1} steps ")
