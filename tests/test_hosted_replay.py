"""Loops on hosts are evicted and run again as those beside the engine are: the same tests, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import helpers
from .local_hosts import LocalHosts
from .test_replay import *  # noqa: F403
from .test_replay import _no_calls  # noqa: F401
from .test_replay import pytestmark as pytestmark


@pytest.fixture(autouse=True)
def _hosted() -> Iterator[None]:
    helpers.hosting.append(LocalHosts)
    yield
    helpers.hosting.clear()
