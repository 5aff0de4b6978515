"""What a pause, a resume and a wake-up cost without an engine: the least that any of them could take."""

from __future__ import annotations

import asyncio

import anyio
from anyio import Event
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from benches.harness import calm, now, settle

__all__ = ["Crowd", "Watch", "bare_cancel", "bare_evict", "bare_floor", "bare_stall", "bare_wake"]


class Crowd:
    """Tasks that wait for an event each, then all for one gate.

    Attributes:
        events: One for each task.
        gate: Where they park.
        all_parked: Set when the last one parks.
        through: Set when the first one is through the gate.
    """

    def __init__(self, tasks: int) -> None:
        self.events = [Event() for _ in range(tasks)]
        self.gate = Event()
        self.all_parked = Event()
        self.through = Event()
        self._parked = 0

    async def turn(self, event: Event) -> None:
        """Wakes, and parks."""
        await event.wait()
        self.park()
        await self.gate.wait()
        self.through.set()

    def park(self) -> None:
        """Counts one that parks."""
        self._parked += 1
        if self._parked == len(self.events):
            self.all_parked.set()


async def bare_floor(tasks: int, rounds: int) -> list[float]:
    """Milliseconds until so many tasks, each woken by an event of its own, wait for one common event."""
    taken: list[float] = []
    for _ in range(rounds):
        crowd = Crowd(tasks)
        async with anyio.create_task_group() as group:
            for event in crowd.events:
                group.start_soon(crowd.turn, event)
            await settle()
            calm()
            started = now()
            for event in crowd.events:
                event.set()
            await crowd.all_parked.wait()
            taken.append((now() - started) * 1e3)
            crowd.gate.set()
    return taken


async def bare_wake(tasks: int, rounds: int) -> list[float]:
    """Milliseconds from the opening of a gate at which so many tasks wait, until the first is through."""
    taken: list[float] = []
    for _ in range(rounds):
        crowd = Crowd(tasks)
        async with anyio.create_task_group() as group:
            for event in crowd.events:
                event.set()
                group.start_soon(crowd.turn, event)
            await settle()
            calm()
            started = now()
            crowd.gate.set()
            await crowd.through.wait()
            taken.append((now() - started) * 1e3)
    return taken


async def bare_cancel(tasks: int, rounds: int, backend: str) -> list[float]:
    """Milliseconds to cancel so many waiting tasks of the event loop itself, and to see them end."""
    taken: list[float] = []
    for _ in range(rounds):
        taken.append(await (_cancel_asyncio if backend == "asyncio" else _cancel_trio)(tasks))
    return taken


async def _cancel_asyncio(count: int) -> float:
    tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(count)]
    await asyncio.sleep(0)
    calm()
    started = now()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return (now() - started) * 1e3


async def _cancel_trio(count: int) -> float:
    import trio

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(trio.Event().wait)
        await settle()
        calm()
        started = now()
        nursery.cancel_scope.cancel()
    return (now() - started) * 1e3


async def bare_evict(tasks: int, rounds: int) -> list[float]:
    """Milliseconds to cancel so many tasks that wait in groups of 8, and to see the last group end.

    Each group has a scope and a task group, as the engine's have; nothing is kept of anybody.
    """
    taken: list[float] = []
    for _ in range(rounds):
        nest = _Nest(max(1, tasks // 8), min(tasks, 8))
        async with anyio.create_task_group() as groups:
            for scope in nest.scopes:
                groups.start_soon(nest.group, scope)
            await settle()
            calm()
            started = now()
            for scope in nest.scopes:
                scope.cancel()
            await nest.all_ended.wait()
            taken.append((now() - started) * 1e3)
    return taken


class _Nest:
    def __init__(self, groups: int, members: int) -> None:
        self.scopes = [anyio.CancelScope() for _ in range(groups)]
        self.all_ended = Event()
        self._gate = Event()
        self._members = members
        self._left = groups

    async def group(self, scope: anyio.CancelScope) -> None:
        """Runs one group to its end."""
        with scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(self._members - 1):
                    tasks.start_soon(self._gate.wait)
                await self._gate.wait()
        self._left -= 1
        if not self._left:
            self.all_ended.set()


class Watch:
    """Runs once in every turn of the event loop: what another task has to wait at most, while it could run."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._before = 0.0
        self._stopped = False

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Watches until `stop`."""
        self._before = now()
        task_status.started()
        while not self._stopped:
            await checkpoint()
            self._look()

    def stop(self) -> float:
        """Ends it; returns the longest turn in ms, the one that runs included."""
        self._look()
        self._stopped = True
        return self._longest * 1e3

    def _look(self) -> None:
        at = now()
        self._longest = max(self._longest, at - self._before)
        self._before = at


async def bare_stall(tasks: int, rounds: int) -> list[float]:
    """Longest turn of the event loop, in ms, while so many tasks wake and park at one gate."""
    taken: list[float] = []
    for _ in range(rounds):
        crowd, watch = Crowd(tasks), Watch()
        async with anyio.create_task_group() as group:
            for event in crowd.events:
                group.start_soon(crowd.turn, event)
            await settle()
            calm()
            await group.start(watch.run)
            for event in crowd.events:
                event.set()
            await crowd.all_parked.wait()
            taken.append(watch.stop())
            crowd.gate.set()
    return taken
