"""The bench of checkpoints: it makes what it says it saves. Nothing here is timed."""

from __future__ import annotations

import anyio
import pytest

from benches.harness import BACKENDS
from benches.save import BYTES_A_TOKEN, measure


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group_size", [4, 1])
def test_it_saves_what_is_ready_and_in_flight(backend: str, group_size: int) -> None:
    saved = anyio.run(measure, 16, group_size, 8, 100, 2, backend=backend)
    assert saved.raw == BYTES_A_TOKEN * (16 * 100 + 8 * 50)
    assert saved.size > saved.raw * 8 / 9  # all columns are in it, without the origin
    assert len(saved.snapshots) == 2
    assert saved.idle
