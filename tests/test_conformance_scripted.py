"""The scripted controller keeps the contract of every controller, so what is tested with it holds for real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from anyio.lowlevel import checkpoint

from rollnest.abc import InferenceController, WeightSource
from rollnest.testing import ScriptedController

from .conformance import CHECKS, Check, ControllerCase, Stall, check_name

pytestmark = pytest.mark.anyio


class ScriptedCase(ControllerCase):
    def __init__(self) -> None:
        self.controller = ScriptedController(stop_every=10**9)

    def open(self) -> AbstractAsyncContextManager[InferenceController]:
        return self.controller

    def prompt(self, number: int) -> list[int]:
        return [1 + number, 7, 5]

    @asynccontextmanager
    async def stall(self, *, after: int) -> AsyncIterator[Stall]:
        with self.controller.stalled(after=after) as stall:
            yield stall

    def passes(self) -> int:
        return self.controller.sampled

    def new_weights(self) -> WeightSource:
        return {}

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        return self.controller.open

    async def let_run(self) -> None:
        for _ in range(50):
            await checkpoint()  # no threads: virtual time would jump

    def late_tokens(self, controller: InferenceController) -> int:
        return self.controller.wasted


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check) -> None:
    await check(ScriptedCase())
