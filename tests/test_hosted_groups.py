"""Group loops on hosts behave as those beside the engine do: the same tests, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import helpers
from .local_hosts import LocalHosts
from .test_group_loops import *  # noqa: F403
from .test_group_loops import pytestmark as pytestmark
from .test_replayable_groups import *  # noqa: F403


@pytest.fixture(autouse=True)
def _hosted() -> Iterator[None]:
    helpers.hosting.append(LocalHosts)
    yield
    helpers.hosting.clear()
