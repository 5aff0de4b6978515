"""Who gets a slot that comes free: first come first served, and who goes on with something before all."""

from __future__ import annotations

import pytest
from anyio import CancelScope, create_task_group, move_on_after, sleep
from anyio.abc import TaskGroup
from attrs import evolve

from rollnest import Capacity, Engine, Rollout, Sampling
from rollnest._slots import Slots
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


class Queue:
    """Tasks that take a slot each, hold it for a second, and are noted in the order in which they got it."""

    def __init__(self, slots: Slots, tasks: TaskGroup) -> None:
        self.slots = slots
        self.got: list[str] = []
        self._tasks = tasks

    async def join(self, name: str, *, first: bool = False) -> CancelScope:
        scope = CancelScope()

        async def hold() -> None:
            with scope:
                await (self.slots.acquire_first() if first else self.slots.acquire())
                self.got.append(name)
                try:
                    await sleep(1)
                finally:
                    self.slots.release()

        self._tasks.start_soon(hold)
        await sleep(0.01)
        return scope


async def test_who_goes_on_waits_before_those_who_begin() -> None:
    async with create_task_group() as tasks:
        queue = Queue(Slots(1), tasks)
        for name in "abc":
            await queue.join(name)
        await queue.join("d", first=True)
        await queue.join("e", first=True)
        assert queue.slots.waiting == queue.slots.tree(0.0).waiting == 4
    assert queue.got == ["a", "d", "e", "b", "c"]
    assert (queue.slots.used, queue.slots.waiting) == (0, 0)
    assert queue.slots.take()


@pytest.mark.parametrize("first", [False, True])
async def test_who_leaves_the_line_costs_no_slot(first: bool) -> None:
    async with create_task_group() as tasks:
        queue = Queue(Slots(1), tasks)
        await queue.join("a")
        gone = await queue.join("b", first=first)
        await queue.join("c", first=first)
        gone.cancel()
    assert queue.got == ["a", "c"]
    assert queue.slots.used == 0
    assert queue.slots.take()


@pytest.mark.parametrize("first", [False, True])
async def test_a_slot_that_is_handed_to_someone_who_is_cancelled_goes_on(first: bool) -> None:
    async with create_task_group() as tasks:
        slots = Slots(1)
        assert slots.take()
        queue = Queue(slots, tasks)
        gone = await queue.join("a", first=first)
        await queue.join("b")
        slots.release()
        gone.cancel()  # in the same step
    assert queue.got in (["b"], ["a", "b"])
    assert slots.used == 0
    assert slots.take()


async def test_without_a_bound_nobody_waits() -> None:
    slots = Slots(None)
    await slots.acquire_first()
    await slots.acquire()
    assert (slots.used, slots.waiting) == (2, 0)
    slots.release()
    slots.release()
    assert slots.used == 0


async def test_a_turn_that_lost_its_slot_in_a_pause_is_the_next() -> None:
    # One slot, a turn of ten seconds, and a hundred short ones that wait. Whether the long one or another goes on after
    # a pause is chance on trio; but then it goes on after that one, and not after all that wait.
    ended: list[str] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=100 if rollout.prompt.uid == "p0" else 10)
        ended.append(rollout.prompt.uid)

    controller = ScriptedController(rate=10.0, stop_every=10**9, stream=True)
    task = spec(prompts=prompts(101), loop=loop, group_size=1, shuffle=False, epochs=1, judger=None)
    task = evolve(task, sampling=Sampling(200))
    async with (
        Engine(controller, task, capacity=Capacity(turns=1)) as engine,
        create_task_group() as tasks,
    ):
        with move_on_after(1):
            await engine.next_batch(1)  # so that the long one begins
        tasks.start_soon(engine.next_batch, 101)
        await sleep(1)
        for _ in range(30):
            async with engine.paused():
                pass
            await sleep(1.6)
        assert ended.index("p0") < 20
        assert_conserved(engine, committed=controller.committed)
        tasks.cancel_scope.cancel()
