"""The vLLM controller keeps the contract of every controller, over real HTTP, on both event loops, in both forms."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import pytest

from rollnest.abc import InferenceController, WeightSource
from rollnest.testing.servers import VllmServer
from rollnest_adapters.vllm import VllmController

from .conformance import CHECKS, Check, ControllerCase, Stall, check_name
from .hand_clock import hand_backends

pytestmark = pytest.mark.anyio


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


class AllStand:
    """Everything that was sent has arrived at the server, and stands still there."""

    def __init__(self, case: VllmCase) -> None:
        self.case = case

    async def reached(self) -> None:
        while True:
            held = self.case.server.policy.decodings.values()
            sent = len(self.case.controller.open_requests)
            if sent and len(held) == sent and all(one.standing for one in held):
                return
            await anyio.lowlevel.checkpoint()


class VllmCase(ControllerCase):
    def __init__(self, stream_every: int | None) -> None:
        self.server = VllmServer()
        self.stream_every = stream_every

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[InferenceController]:
        self.server.policy.restart()
        async with self.server.serve():
            async with VllmController(
                self.server.url, stream_every=self.stream_every
            ) as controller:
                self.controller = controller
                yield controller
            assert self.server.policy.paused is None
            assert not self.server.asleep

    def prompt(self, number: int) -> list[int]:
        return [1 + number, 7, 5]

    @asynccontextmanager
    async def stall(self, *, after: int) -> AsyncGenerator[Stall]:
        with self.server.stalled(after=after):
            yield AllStand(self)

    def passes(self) -> int:
        return self.server.policy.passes

    def new_weights(self) -> WeightSource:
        return "/models/other"

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        assert isinstance(controller, VllmController)
        await self.let_run()
        return {*controller.open_requests, *self.server.policy.decodings}

    def late_tokens(self, controller: InferenceController) -> int:
        assert isinstance(controller, VllmController)
        return controller.tokens_late + self.server.policy.wasted

    async def let_run(self) -> None:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("stream_every", [None, 1, 4], ids=["whole", "by-1", "by-4"])
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check, stream_every: int | None) -> None:
    await check(VllmCase(stream_every))
