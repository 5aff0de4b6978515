"""Small builders that several test modules use."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollnest import Capabilities, Engine, Prompt, Sample, Sampling, TaskSpec
from rollnest.abc import Attempt
from rollnest.testing import (
    Reply,
    Script,
    ScriptedController,
    assert_conserved,
    cancel_at_step,
)

__all__ = [
    "cancel_nobody",
    "cancelled_at_every_step",
    "each_way",
    "in_turn",
    "one_name",
    "one_batch",
    "prompts",
    "run_to_its_exit",
    "spec",
]


def one_name(value: object) -> str:
    """An id of a parameter that is the same in every process: without addresses, and sets in order."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    if isinstance(value, Capabilities):
        return f"Capabilities {one_name(value.pause_modes)}"
    return getattr(value, "__name__", str(value))


def prompts(count: int) -> list[Prompt]:
    """Prompts with ids of their own."""
    return [Prompt(f"p{i}", token_ids=[1 + i, 2]) for i in range(count)]


def score_one(sample: Sample) -> float:
    """A judger that is content with anything, and quick enough for a thread."""
    return 1.0


async def score_parity(sample: Sample) -> float:
    """An async judger that tells samples apart."""
    return float(len(sample.segments[0]) % 2)


hosting: list[Callable[[Any], Any]] = []
"""What puts a task's loop elsewhere, where a module runs the tests of another one so."""


def spec(**options: Any) -> TaskSpec:
    """A task with small defaults."""
    defaults: dict[str, Any] = {
        "name": "task",
        "prompts": prompts(40),
        "judger": score_parity,
        "group_size": 2,
        "sampling": Sampling(20),
    }
    options = defaults | options
    if hosting and "loop" in options:
        options["loop"] = hosting[0](options["loop"])
    return TaskSpec(**options)


def in_turn(*replies: Reply | Callable[[Attempt], Reply]) -> Script:
    """A script that gives these replies one after the other, and the last one for ever."""
    left = list(replies)

    def script(attempt: Attempt) -> Reply:
        reply = left.pop(0) if len(left) > 1 else left[0]
        return reply(attempt) if callable(reply) else reply

    return script


async def cancel_nobody() -> None:
    """Raises a cancellation whose scope is over."""
    kept: BaseException | None = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await checkpoint()
        except anyio.get_cancelled_exc_class() as error:
            kept = error
            raise
    assert kept is not None
    raise kept


def run_to_its_exit(
    main: Callable[[], Awaitable[object]], backend: str, error: type[BaseException]
) -> None:
    """Runs something that ends with an exit out of a task, which ends asyncio's loop at once.

    The tasks that it leaves behind are let go here. Later they would be found in the middle of another test, tell the
    log about their exceptions, and confuse `ast.parse` if it happens to run.
    """
    with pytest.raises(error):
        anyio.run(main, backend=backend)
    gc.collect()


each_way = pytest.mark.parametrize(
    ("backend", "native"),
    [("asyncio", False), ("asyncio", True), ("trio", False)],
    ids=["asyncio", "asyncio-native", "trio"],
)
"""Both event loops; `native` says whether a cancellation is asyncio's own `task.cancel()`."""


def cancelled_at_every_step(
    make: Callable[[], tuple[Engine, ScriptedController]],
    body: Callable[[Engine], Awaitable[object]],
    backend: Literal["asyncio", "trio"],
    native: bool,
    *,
    check: Callable[[Engine, ScriptedController, str], object] | None = None,
    at_least: int = 40,
) -> int:
    """Cancels an engine's block before each of its steps, each time with another engine; nothing may be left over.

    Args:
        make: Makes the engine.
        body: What is done in its block.
        backend: Which event loop.
        native: Whether the cancellation is asyncio's own.
        check: Looks at what else must hold if the engine was entered, and is told the step for its messages.
        at_least: How many steps the block has in any case.

    Returns:
        How many steps it had.
    """
    step = 0
    while True:
        step += 1
        engine, controller = make()
        entered = False

        async def operation() -> None:
            nonlocal entered
            async with engine:  # noqa: B023
                entered = True
                await body(engine)  # noqa: B023

        report = cancel_at_step(operation, step, backend=backend, native=native)
        where = f"step {step}: {report}, {controller.log[-3:]}"
        assert (report.tasks_left, report.threads_left) == (0, ()), where
        assert not controller.open, where
        assert controller.log == [] or controller.log[-1] == ("exit", 0), where
        assert controller.while_paused == 0, where
        assert controller.refused == [], where
        if entered:
            assert_conserved(engine, committed=controller.committed)
            assert engine.statistics().total("flight") == 0, where
            if check is not None:
                check(engine, controller, where)
        if not report.cancelled:
            break
    assert step > at_least
    return step


async def one_batch(
    controller: ScriptedController, task: TaskSpec | Sequence[TaskSpec], n: int = 1, **options: Any
) -> tuple[Any, Engine]:
    """Runs an engine until its first batch; returns both."""
    async with Engine(controller, task, **options) as engine:
        batch = await engine.next_batch(n)
    return batch, engine
