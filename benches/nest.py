"""The baselines of `overhead`: what one would write by hand, without the engine.

`Nest` is the engine's nest of task groups and scopes (section 4 of the design), and nothing else:

    engine's task group
        producer task
            task group of the groups
                group task: a cancel scope, a task group of its own, then the hand-over to the consumer
                    sample task: a cancel scope
                        turn: a slot of a semaphore, a cancel scope, one call of the policy

The scope of the turn is there so that a pause can end one turn, that of the group so that a pause can evict it, the
semaphore because servers have a bound, the task group of a group because a group ends as a whole. A group that has
ended goes to the consumer through a memory object stream, one by one and in the order in which they end, because a
batch is the first groups that are ready and not those that were started first. A reply's ids and logprobs are appended
to two lists, and a batch is the list of its samples' lists. There is no table, record, check, gate, limit, statistics
or failure handling. The semaphore is the cheapest that anyio has (`fast_acquire`), as in the engine.

`gather` is cheaper still: one flat crowd of tasks with one call each; no program that rolls out groups looks like that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from anyio import CancelScope, Semaphore, create_memory_object_stream, create_task_group
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from benches.instant import IDS, LOGPROBS

__all__ = ["Nest", "gather", "reply"]

Reply = tuple[list[int], list[float]]


async def reply() -> Reply:
    """One call of a policy that answers at once: one checkpoint, as in `InstantController`."""
    await checkpoint()
    return IDS, LOGPROBS


class Nest:
    """Runs batches of groups, until its block is left.

    Args:
        group_size: Samples of a group.
        turns: Turns at once, over all groups.
        generate: The policy; called once for each sample.
    """

    def __init__(
        self,
        group_size: int,
        *,
        turns: int = 512,
        generate: Callable[[], Coroutine[Any, Any, Reply]] = reply,
    ) -> None:
        self._group_size = group_size
        self._slots = Semaphore(turns, fast_acquire=True)
        self._generate = generate
        self._orders, self._ordered = create_memory_object_stream[int](1)
        self._groups, self._ready = create_memory_object_stream[list[Reply]](1)
        self._engine: TaskGroup = create_task_group()

    async def __aenter__(self) -> Nest:
        await self._engine.__aenter__()
        self._engine.start_soon(self._produce)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._orders.close()
        await self._engine.__aexit__(*exc_info)
        self._ready.close()

    async def batch(self, groups: int) -> list[Reply]:
        """Runs that many groups; returns their samples when the last one has ended."""
        await self._orders.send(groups)
        samples: list[Reply] = []
        for _ in range(groups):
            samples += await self._ready.receive()
        return samples

    async def _produce(self) -> None:
        with self._ordered, self._groups:
            async with create_task_group() as running:
                async for groups in self._ordered:
                    for _ in range(groups):
                        running.start_soon(self._group)

    async def _group(self) -> None:
        samples: list[Reply] = []
        with CancelScope():
            async with create_task_group() as members:
                for _ in range(self._group_size):
                    members.start_soon(self._sample, samples)
            await self._groups.send(samples)

    async def _sample(self, samples: list[Reply]) -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        with CancelScope():
            await self._turn(ids, logprobs)
        samples.append((ids, logprobs))

    async def _turn(self, ids: list[int], logprobs: list[float]) -> None:
        async with self._slots:
            with CancelScope():
                new_ids, new_logprobs = await self._generate()
                ids.extend(new_ids)
                logprobs.extend(new_logprobs)


async def gather(samples: int, backend: str) -> None:
    """`asyncio.gather` of so many replies; on trio, one nursery of as many tasks."""
    if backend == "asyncio":
        await asyncio.gather(*(reply() for _ in range(samples)))
        return
    import trio

    async with trio.open_nursery() as nursery:
        for _ in range(samples):
            nursery.start_soon(reply)
