"""The scripted server dies and comes back."""

from __future__ import annotations

import anyio
import pytest
from anyio import create_task_group, fail_after, move_on_after, sleep

from rollnest import Attempt, Sampling
from rollnest.abc import InferenceController, PauseMode
from rollnest.errors import InferenceError
from rollnest.testing import ScriptedController

pytestmark = pytest.mark.anyio


def attempt() -> Attempt:
    return Attempt([1, 2], max_tokens=20, sampling=Sampling(20))


async def test_a_crash_fails_what_is_in_flight_and_what_comes() -> None:
    async with ScriptedController(rate=10.0, stop_every=10**9, stream=True) as server:
        one = attempt()
        async with create_task_group() as tasks:

            async def generate() -> None:
                with pytest.raises(InferenceError, match="reset") as caught:
                    await server.generate(one)
                assert caught.value.retryable
                assert caught.value.maybe_executed

            tasks.start_soon(generate)
            await sleep(1.05)
            server.crash()
        assert len(one.received) == 10
        assert one.finish_reason is None
        assert server.committed == 10
        assert not server.open
        policy: InferenceController = server
        for call in (
            policy.generate(attempt()),
            policy.abort(None),
            policy.pause(PauseMode.ABORT),
            policy.resume(),
            policy.update_weights({}, 1),
            policy.version(),
            policy.health(),
            policy.release(["kv"]),
            policy.reload(["kv"]),
        ):
            with pytest.raises(InferenceError, match="refused") as caught:
                await call
            assert caught.value.retryable
            assert not caught.value.maybe_executed


async def test_a_silent_crash_answers_nobody() -> None:
    async with ScriptedController(rate=10.0, stop_every=10**9, stream=True) as server:
        one = attempt()
        with move_on_after(60):
            async with create_task_group() as tasks:
                tasks.start_soon(server.generate, one)
                await sleep(1.05)
                server.crash(silent=True)
        assert anyio.current_time() >= 60
        assert len(one.received) == 10
        assert not server.open
        for call in (server.health, server.version, server.resume):
            with move_on_after(60) as scope:
                await call()
            assert scope.cancelled_caught


async def test_a_restarted_server_knows_of_nothing() -> None:
    async with ScriptedController(version=3) as server:
        await server.pause(PauseMode.ABORT)
        await server.release(["kv"])
        server.crash()
        server.restart(version=1)
        assert await server.version() == 1
        one = attempt()
        with fail_after(1):
            await server.generate(one)
        assert one.received.newest_version == 1
        assert (await server.health()).running == 0
