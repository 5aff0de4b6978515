"""Hosts in this process: they run loops as actors would, under virtual time, and can be killed.

Messages are pickled and arrive a step later, so nothing is shared that could not be sent.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from anyio import CancelScope, Event, create_task_group
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from rollnest import AgentLoop
from rollnest.hosting import Host, HostedLoop, LoopHost

__all__ = ["LocalHosts"]


class LocalHosts(HostedLoop):
    """Runs a loop on hosts in this process, while its block is open.

    Attributes:
        all: Every host that there was.
        deaf: Whether hosts ignore the messages that end a loop.
    """

    def __init__(self, loop: Any, workers: int = 2, *, restart: bool = True) -> None:
        super().__init__(loop)
        self._workers = workers
        self._restart = restart
        self._tasks: TaskGroup | None = None
        self.all: list[LocalHost] = []
        self.kills = 0

    async def __aenter__(self) -> LocalHosts:
        self._tasks = create_task_group()
        await self._tasks.__aenter__()
        for _ in range(self._workers):
            self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(exc_type, exc, traceback)
        left = [host for host in self.all if host.here.sessions or host.here.requests]
        assert left == []
        assert self.hosts == [] or all(not host.sessions for host in self.hosts)
        self.hosts.clear()

    def start(self) -> LocalHost:
        """Starts another host."""
        assert self._tasks is not None
        host = LocalHost(self, f"host{len(self.all)}", self.loop)
        self.all.append(host)
        self._tasks.start_soon(host.run)
        self.join(host.there)
        return host

    @property
    def living(self) -> list[LocalHost]:
        return [host for host in self.all if host.there.lost is None]

    def kill(self, host: LocalHost | None = None, why: str = "killed") -> None:
        """Kills a host: it says nothing more."""
        host = host or max(self.living, key=lambda h: len(h.there.sessions))
        self.kills += 1
        host.scope.cancel()
        self.lose(host.there, why)
        if self._restart:
            self.start()

    def give_up(self, host: Host, why: str) -> None:
        (local,) = [h for h in self.all if h.there is host]
        if host.lost is None:
            self.kill(local, why)

    async def orphans(self) -> list[str]:
        """What still runs somewhere; of those that were killed, nothing does."""
        return [uid for host in self.living for uid in host.here.sessions]


class LocalHost:
    """One of them, seen from both sides."""

    def __init__(self, loops: LocalHosts, name: str, loop: AgentLoop) -> None:
        self.there = Host(name, self.send)
        self.here = LoopHost(loop, self.send_back)
        self.scope = CancelScope()
        self.deaf: Callable[[Any], bool] = lambda message: False
        self._to: deque[bytes] = deque()
        self._back: deque[bytes] = deque()
        self._bell = Event()

    def send(self, message: Any) -> None:
        self._to.append(pickle.dumps(message))
        self._bell.set()

    def send_back(self, message: Any) -> None:
        self._back.append(pickle.dumps(message))
        self._bell.set()

    async def run(self) -> None:
        with self.scope:
            async with self.here:
                while True:
                    while self._to or self._back:
                        if self._to:
                            message = pickle.loads(self._to.popleft())
                            if not self.deaf(message):
                                self.here.receive(message)
                        if self._back:
                            self.there.receive(pickle.loads(self._back.popleft()))
                        await checkpoint()
                    self._bell = Event()
                    await self._bell.wait()
