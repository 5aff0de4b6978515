"""Each HTTP controller keeps the contract of every controller, over real HTTP, on both event loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conformance import CHECKS, Check, check_name
from .hand_clock import hand_backends
from .http_cases import CASES, HttpCase, VllmCase

pytestmark = pytest.mark.anyio


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


class VllmByOne(VllmCase):
    """Every token in an event of its own."""

    def make(self, url: str, **options: Any) -> Any:
        return super().make(url, stream_every=1, **options)


@pytest.mark.parametrize(
    "make", [*CASES.values(), lambda: VllmByOne(streams=True)], ids=[*CASES, "vllm-stream-1"]
)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
async def test_conformance(check: Check, make: Callable[[], HttpCase]) -> None:
    await check(make())
