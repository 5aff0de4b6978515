"""A test that waits for something that can't happen ends, and says where its tasks wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import TaskStatus

from rollnest import Sample
from rollnest.errors import leaves
from rollnest.testing import ScriptedController, VirtualTimeStuck, virtual_backends

from .helpers import one_batch, spec

backends = pytest.mark.parametrize("make", virtual_backends(), ids=["asyncio", "trio"])


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollnest.testing._stuck.STUCK_AFTER", 0.0)


def run(make: Callable[[], tuple[str, dict[str, Any]]], main: Callable[[], Any]) -> None:
    """Runs it on either event loop; trio's own error is taken off."""
    backend, options = make()
    try:
        anyio.run(main, backend=backend, backend_options=options)
    except trio.TrioInternalError as error:
        (stuck,) = leaves(error.__cause__ or error)
        raise stuck from None


@backends
def test_a_deadlock_says_where_each_task_waits(
    make: Callable[[], tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    async def waits_for_ever(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(waits_for_ever, name="the one")
            await anyio.sleep(1000)  # time jumps as long as there is something to wait for

    with pytest.raises(VirtualTimeStuck, match="no deadline is set") as caught:
        run(make, main)
    assert "the one\n" in str(caught.value)
    assert "waits_for_ever" in str(caught.value)
    if make is virtual_backends()[1]:  # anyio's pytest plugin doesn't pass it on
        assert "waits_for_ever" in caplog.text


@backends
def test_a_thread_that_works_for_the_engine_is_waited_for(
    make: Callable[[], tuple[str, dict[str, Any]]],
) -> None:
    def judge(sample: Sample) -> float:
        for number in range(100_000):  # longer than nothing at all
            number += 1
        return 1.0

    async def main() -> None:
        batch, _ = await one_batch(ScriptedController(), spec(judger=judge), stall_after=None)
        assert len(batch) == 1

    run(make, main)
