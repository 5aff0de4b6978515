"""The transformers controller keeps the contract of every controller, on both event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from rollnest import PauseMode
from rollnest.abc import InferenceController, WeightSource
from rollnest_adapters.transformers import TransformersController
from tests.conformance import CHECKS, Check, ControllerCase, Stall, check_name
from tests.tiny_llama import VOCAB_SIZE, Brake, tiny_llama
from tests.tiny_llama import small_torch as small_torch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("small_torch")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


class TransformersCase(ControllerCase):
    """A tiny Llama whose forward passes can be held up."""

    def __init__(self) -> None:
        self.model = tiny_llama()
        self.brake = Brake(self.model)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[InferenceController]:
        async with TransformersController(self.model, page_size=8, num_blocks=256) as controller:
            try:
                yield controller
            finally:
                self.brake.let_go()  # a failed check must not hang

    def prompt(self, number: int) -> list[int]:
        return [1 + number % 63, 7, number // 8, 5, 3]

    def stall(self, *, after: int) -> AbstractAsyncContextManager[Stall]:
        return self.brake.stall(after=after)

    def passes(self) -> int:
        return self.brake.passes

    def new_weights(self) -> WeightSource:
        weights: dict[str, Any] = tiny_llama(seed=1).state_dict()
        return weights

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        assert isinstance(controller, TransformersController)
        manager = controller._manager
        if manager is None:
            return controller.open_requests
        for _ in range(2):  # the loop takes cancellations up when the first of these is over
            await controller.pause(PauseMode.ABORT)
            await controller.resume()
        scheduler = manager.batch_processor.scheduler
        assert not manager.output_router.result_handlers
        return {
            *controller.open_requests,
            *scheduler.active_requests,
            *scheduler.waiting_requests,
        }

    def late_tokens(self, controller: InferenceController) -> int:
        assert isinstance(controller, TransformersController)
        return controller.tokens_late


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check) -> None:
    case = TransformersCase()
    assert case.prompt(0)[0] < VOCAB_SIZE
    await check(case)
