"""Loops on hosts behave as those beside the engine do: the same tests, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollnest import AgentLoop
from rollnest._loops import overrides_generate_group

from . import helpers
from .local_hosts import LocalHosts
from .test_field_faults_replay import *  # noqa: F403
from .test_limits import *  # noqa: F403
from .test_loops import *  # noqa: F403
from .test_loops import pytestmark as pytestmark
from .test_partials import *  # noqa: F403


@pytest.fixture(autouse=True)
def _hosted() -> Iterator[None]:
    helpers.hosting.append(lambda loop: loop if is_of_groups(loop) else LocalHosts(loop))
    yield
    helpers.hosting.clear()


def is_of_groups(loop: object) -> bool:
    """Whether a loop runs whole groups, which hosts don't."""
    return isinstance(loop, AgentLoop) and overrides_generate_group(loop)
