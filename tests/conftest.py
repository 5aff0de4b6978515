"""Fixtures of all tests: every async test runs on both event loops, under virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollnest.testing import virtual_backends


@pytest.fixture(params=virtual_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()
