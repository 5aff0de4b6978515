"""An actor in which agent loops run. It owns their coroutines and nothing else; see `rollnest.hosting`.

It imports the engine and the loop, and no more: no policy, no torch. Messages come and go in bundles, as many as are
there, so a call costs the same whether one loop runs or a hundred do.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

from attrs import frozen

from rollnest import Failure
from rollnest.hosting import End, Ended, FromHost, LoopHost

__all__ = ["LoopActor", "RayLoopState"]


@frozen(kw_only=True)
class RayLoopState:
    """What an actor of `RayLoops` is at; asked inside it.

    Attributes:
        name: The actor's.
        rollouts: Names of the rollouts whose loops run there, and of groups.
        requests: What these have asked the engine for and not got yet.
        abandoned: Names of tools whose thread can't be stopped, and for which nobody waits any more.
        tasks: Names of all of its asyncio tasks.
    """

    name: str
    rollouts: tuple[str, ...]
    requests: int
    abandoned: str
    tasks: tuple[str, ...]


class LoopActor:
    """Runs loops for an engine in another process.

    Args:
        name: What it is called.
        loop: The agent loop, pickled.
        exit_grace: Seconds at the end for tools in worker threads.
    """

    def __init__(self, name: str, loop: bytes, exit_grace: float) -> None:
        self._name = name
        self._outbox: list[FromHost] = []
        self._told = asyncio.Event()
        self._open = asyncio.Event()
        self._host = LoopHost(pickle.loads(loop), self._send, exit_grace=exit_grace)

    def _send(self, message: FromHost) -> None:
        self._outbox.append(message)
        self._told.set()

    async def run(self) -> None:
        """Owns the loops, until it is cancelled; ends when they have."""
        async with self._host:
            self._open.set()
            await asyncio.Event().wait()

    async def ready(self) -> None:
        """Returns once loops can run."""
        await self._open.wait()

    async def push(self, bundle: Sequence[tuple[int, bytes]]) -> None:
        """Takes messages of the engine's, each with the number of its session."""
        for session, packed in bundle:
            try:
                message = pickle.loads(packed)
            except Exception as error:  # something of the user's that can't be found here
                self._send(Ended(session, (), Failure.of("loop", error)))
                self._host.receive(End(session))  # its loop may run, and wait for that
            else:
                self._host.receive(message)

    async def pull(self) -> bytes:
        """Returns what is there for the engine, once there is anything."""
        while not self._outbox:
            self._told.clear()
            await self._told.wait()
        messages, self._outbox = self._outbox, []
        return pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)

    async def state(self) -> RayLoopState:
        """Returns what it is at."""
        own = asyncio.current_task()
        return RayLoopState(
            name=self._name,
            rollouts=self._host.sessions,
            requests=self._host.requests,
            abandoned=self._host.abandoned,
            tasks=tuple(sorted(t.get_name() for t in asyncio.all_tasks() if t is not own)),
        )
