"""A pool of controllers keeps the contract of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import frozen

from rollnest.abc import InferenceController, WeightSource
from rollnest.testing import ScriptedController
from rollnest.testing import Stall as ScriptedStall
from rollnest_adapters.pool import AdaptiveConcurrency, ControllerPool

from .conformance import CHECKS, Check, ControllerCase, Stall, check_name

pytestmark = pytest.mark.anyio


@frozen
class AnyStall:
    """All servers stall; a single request is at one of them."""

    stalls: list[ScriptedStall]

    async def reached(self) -> None:
        async with anyio.create_task_group() as tasks:

            async def reached(stall: ScriptedStall) -> None:
                await stall.reached()
                tasks.cancel_scope.cancel()

            for stall in self.stalls:
                tasks.start_soon(reached, stall)


class PoolCase(ControllerCase):
    def __init__(self, servers: int, concurrency: int | AdaptiveConcurrency | None) -> None:
        self.servers = {name: ScriptedController(stop_every=10**9) for name in "abc"[:servers]}
        self.pool = ControllerPool(self.servers, concurrency=concurrency)

    def open(self) -> AbstractAsyncContextManager[InferenceController]:
        return self.pool

    def prompt(self, number: int) -> list[int]:
        return [1 + number, 7, 5]

    @asynccontextmanager
    async def stall(self, *, after: int) -> AsyncGenerator[Stall]:
        with ExitStack() as stack:
            yield AnyStall(
                [stack.enter_context(s.stalled(after=after)) for s in self.servers.values()]
            )

    def passes(self) -> int:
        return sum(server.sampled for server in self.servers.values())

    def new_weights(self) -> WeightSource:
        return {}

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        return [id_ for server in self.servers.values() for id_ in server.open]

    async def let_run(self) -> None:
        for _ in range(50):
            await checkpoint()  # no threads: virtual time would jump

    def late_tokens(self, controller: InferenceController) -> int:
        return sum(server.wasted for server in self.servers.values())


SHAPES: dict[str, tuple[int, int | AdaptiveConcurrency | None]] = {
    "one": (1, None),
    "three": (3, None),
    "bounded": (2, 8),
    "adaptive": (2, AdaptiveConcurrency(start=4)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check, shape: str) -> None:
    await check(PoolCase(*SHAPES[shape]))
