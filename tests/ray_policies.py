"""Scripted policies in actors, and how tests hold them up and look into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rollnest.testing import ScriptedController, Stall
from rollnest_adapters.ray import PolicyHost, call
from tests.ray_actors import method

__all__ = ["ScriptedHost", "scripted", "stalled"]


class ScriptedHost(PolicyHost):
    """Holds a `ScriptedController`, the same one each time that it is served."""

    stall: Any = None

    @property
    def scripted(self) -> ScriptedController:
        controller = self._make()
        assert isinstance(controller, ScriptedController)
        return controller

    @method(concurrency_group="control")
    async def hold(self, after: int) -> None:
        """Lets answers come so far, and no further."""

        async def hold() -> None:
            self.stall = self.scripted.stalled(after=after)
            self.held: Stall = self.stall.__enter__()

        await self.at_home(hold)

    @method(concurrency_group="control")
    async def held_up(self) -> None:
        """Returns once an answer stands still."""
        await self.at_home(lambda: self.held.reached())

    @method(concurrency_group="control")
    async def let_go(self) -> None:
        """Lets answers go on."""

        async def let_go() -> None:
            self.stall.__exit__(None, None, None)

        await self.at_home(let_go)

    @method(concurrency_group="control")
    async def figures(self) -> dict[str, Any]:
        """What the scripted server counts."""
        server = self.scripted
        return {
            name: getattr(server, name)
            for name in ("sampled", "wasted", "committed", "while_paused", "refused", "log")
        } | {"open": list(server.open), "paused": server._paused, "held": server._version}

    @method(concurrency_group="control")
    async def restart(self) -> None:
        """Has the weights that it began with again."""

        async def restart() -> None:
            self.scripted.restart()

        await self.at_home(restart)

    @method(concurrency_group="control")
    async def tasks(self) -> list[str]:
        """What runs on the controller's event loop, but for what asks and what serves."""

        async def names() -> list[str]:
            return [
                getattr(task.get_coro(), "__qualname__", "?")
                for task in asyncio.all_tasks()
                if task is not asyncio.current_task()
            ]

        return await self.at_home(names)


class scripted:  # noqa: N801
    """Makes one scripted controller in each process, however often it is asked."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: ScriptedController | None = None

    def __call__(self) -> ScriptedController:
        if self.made is None:
            self.made = ScriptedController(**self.options)
        return self.made


@asynccontextmanager
async def stalled(actor: Any, *, after: int) -> AsyncGenerator[RemoteStall]:
    """Holds up the policy in an actor."""
    await call(actor.hold, after)
    try:
        yield RemoteStall(actor)
    finally:
        with anyio.CancelScope(shield=True):
            await call(actor.let_go)


class RemoteStall:
    """A policy that stands still in its actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def reached(self) -> None:
        await call(self.actor.held_up)
