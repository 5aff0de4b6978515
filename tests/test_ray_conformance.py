"""A policy in an actor keeps the contract of every controller, on both event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import ray

from rollnest.abc import InferenceController, WeightSource
from rollnest_adapters.ray import RayController, call, policy_actor
from tests.conformance import CHECKS, Check, ControllerCase, Stall, check_name
from tests.ray_policies import ScriptedHost, scripted, stalled

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


class RayCase(ControllerCase):
    """A scripted policy in an actor that all checks share."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[InferenceController]:
        await call(self.actor.restart)
        async with RayController(self.actor) as controller:
            yield controller

    def prompt(self, number: int) -> list[int]:
        return [1 + number, 7, 5]

    def stall(self, *, after: int) -> AbstractAsyncContextManager[Stall]:
        return stalled(self.actor, after=after)

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = ray.get(self.actor.figures.remote())
        return figures

    def passes(self) -> int:
        sampled: int = self.figures()["sampled"]
        return sampled

    def new_weights(self) -> WeightSource:
        return {"layer": [1.0, 2.0]}

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        assert isinstance(controller, RayController)
        figures = await call(self.actor.figures)
        return {*controller.open_requests, *await call(self.actor.in_flight), *figures["open"]}

    async def let_run(self) -> None:
        for _ in range(10):
            await call(self.actor.figures)
            await call(self.actor.tasks)

    def late_tokens(self, controller: InferenceController) -> int:
        assert isinstance(controller, RayController)
        wasted: int = self.figures()["wasted"]
        return controller.tokens_late + wasted


@pytest.fixture(scope="module")
def actor(local_ray: None) -> Any:
    return policy_actor(scripted(stop_every=10**9), host=ScriptedHost)


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check, actor: Any) -> None:
    await check(RayCase(actor))
    assert await call(actor.tasks) == []
