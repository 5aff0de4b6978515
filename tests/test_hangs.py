"""A test that hangs says where."""

from __future__ import annotations

import signal
import sys
from io import StringIO

import anyio
import pytest

from .hangs import told_of_hanging

pytestmark = pytest.mark.anyio


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals of Unix")
async def test_a_test_that_hangs_tells_where_its_tasks_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)

    async def waits_for_ever() -> None:
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(waits_for_ever, name="the one")
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        before = signal.getsignal(signal.SIGALRM)
        with (
            pytest.raises(pytest.fail.Exception, match="has run for 500 s"),
            told_of_hanging("tests/test_x.py::test_y", 500),
        ):
            signal.raise_signal(signal.SIGALRM)
        assert signal.getsignal(signal.SIGALRM) is before
        group.cancel_scope.cancel()
    told = out.getvalue()
    assert "tests/test_x.py::test_y has run for 500 s" in told
    assert "the one\n" in told
    assert " waits_for_ever" in told.replace(
        "test_a_test_that_hangs_tells_where_its_tasks_wait.<locals>.", ""
    )
