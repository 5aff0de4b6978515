"""Calls of Ray's actors under cancel scopes, on both event loops, against a real Ray."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import anyio
import pytest
import ray

from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed
from rollnest_adapters.ray import RayCallFailed, call, check_initialized, result, stream
from tests.ray_actors import HANG, Worker, method, remote, until

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


@pytest.fixture(scope="module")
def shared(local_ray: None) -> Any:
    return Worker.remote()


@pytest.fixture
async def worker(shared: Any) -> Any:
    yield shared
    state = await call(shared.state)
    assert state["running"] == 0


async def cancelled(worker: Any) -> int:
    return int((await call(worker.state))["cancelled"])


async def rests(worker: Any) -> bool:
    """Whether none of its calls runs. A generator that was cut at a `yield` ends when Python collects it."""
    return bool((await call(worker.state))["running"] == 0)


async def test_a_call_returns_what_the_actor_returns(worker: Any) -> None:
    with anyio.fail_after(HANG):
        assert await call(worker.echo, {"a": [1, 2]}) == {"a": [1, 2]}
        assert await result(worker.echo.remote(ray.put("value"))) == "value"


async def test_the_actors_own_error_is_raised_as_it_is(worker: Any) -> None:
    with anyio.fail_after(HANG):
        with pytest.raises(ValueError, match="of the actor") as caught:
            await call(worker.fail, ValueError("of the actor"))
    assert type(caught.value) is ValueError
    assert "ray_actors.py" in str(caught.value.__cause__)
    assert "\x1b" not in str(caught.value.__cause__)


async def test_errors_of_rollnest_keep_what_they_say(worker: Any) -> None:
    with anyio.fail_after(HANG):
        with pytest.raises(InferenceError) as one:
            await call(worker.fail, InferenceError("503", retryable=True, maybe_executed=False))
        with pytest.raises(WeightUpdateFailed) as two:
            await call(worker.fail, WeightUpdateFailed("half", weights=WeightsState.UNKNOWN))
    assert (one.value.retryable, one.value.maybe_executed) == (True, False)
    assert two.value.weights is WeightsState.UNKNOWN


async def test_a_cancellation_ends_the_actors_task_before_the_block_is_left(worker: Any) -> None:
    before = await cancelled(worker)
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call, worker.hang)

            async def all_run() -> bool:
                return bool((await call(worker.state))["running"] == 5)

            await until(all_run)
            tasks.cancel_scope.cancel()
        assert (await call(worker.state))["running"] == 0
    assert await cancelled(worker) == before + 5


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_own_cancellation_reaches_the_actor_too(worker: Any) -> None:
    before = await cancelled(worker)
    with anyio.fail_after(HANG):
        waiting = asyncio.ensure_future(call(worker.hang))

        async def runs() -> bool:
            return bool((await call(worker.state))["running"] == 1)

        await until(runs)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await call(worker.state))["running"] == 0
    assert await cancelled(worker) == before + 1


async def test_a_cancelled_call_is_waited_for_while_it_cleans_up(worker: Any) -> None:
    ended = (await call(worker.state))["ended"]
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, worker.hang, 200)

            async def runs() -> bool:
                return bool((await call(worker.state))["running"])

            await until(runs)
            tasks.cancel_scope.cancel()
    state = await call(worker.state)
    assert (state["running"], state["ended"]) == (0, ended + 1)


async def test_bug_092_a_cancellation_reaches_a_call_that_was_only_just_sent(worker: Any) -> None:
    """Ray itself loses a cancellation that comes before the call has begun."""
    with anyio.fail_after(HANG):
        for _ in range(30):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await call(worker.hang)
            assert scope.cancelled_caught
            assert (await call(worker.state))["running"] == 0


async def test_a_value_in_spite_of_a_cancellation_is_dropped(worker: Any) -> None:
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, worker.deny)

            async def runs() -> bool:
                return bool((await call(worker.state))["running"])

            await until(runs)
            tasks.cancel_scope.cancel()


async def test_a_call_that_goes_on_is_left_after_its_grace_and_named(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = remote(StubbornActor, concurrency_groups={"look": 2}).remote()
    with anyio.fail_after(HANG), caplog.at_level(logging.WARNING, "rollnest.ray"):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await call(stubborn.block, grace=0.05)

            tasks.start_soon(ask)

            async def blocks() -> bool:
                return bool(await call(stubborn.blocked))

            await until(blocks)
            tasks.cancel_scope.cancel()
        await call(stubborn.let_go)
    assert "did not end within 0.05 s" in caplog.text


async def test_a_cancellation_that_nobody_asked_for_is_a_failure(worker: Any) -> None:
    with anyio.fail_after(HANG):
        with pytest.raises(RayCallFailed, match="not by its caller") as caught:
            await call(worker.cancel_itself)
    assert caught.value.maybe_executed
    assert not caught.value.retryable


async def test_no_thread_is_blocked_for_a_call(worker: Any) -> None:
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, worker.hang)

            async def one_runs() -> bool:
                return bool((await call(worker.state))["running"] == 1)

            await until(one_runs)
            before = threading.active_count()
            for _ in range(200):
                tasks.start_soon(call, worker.hang)

            async def all_run() -> bool:
                return bool((await call(worker.state))["running"] == 201)

            await until(all_run)
            assert threading.active_count() == before
            tasks.cancel_scope.cancel()


async def test_a_result_that_comes_after_the_event_loop_has_gone_is_dropped() -> None:
    worker: Any = Worker.remote()
    ref = worker.hang.remote()

    async def leave() -> None:
        with anyio.move_on_after(0.01):
            await result(ref, grace=1e-6)

    def run() -> None:
        anyio.run(leave)

    with anyio.fail_after(HANG):
        await anyio.to_thread.run_sync(run)
        await call(worker.echo, 1)
    ray.kill(worker)


# Streams


async def test_a_stream_brings_its_values_in_order_and_ends(worker: Any) -> None:
    with anyio.fail_after(HANG):
        async with stream(worker.count.options(num_returns="streaming").remote(5)) as numbers:
            assert [number async for number in numbers] == [0, 1, 2, 3, 4]
            with pytest.raises(StopAsyncIteration):
                await anext(numbers)


async def test_a_streams_own_error_comes_after_its_values_and_comes_again(worker: Any) -> None:
    seen: list[int] = []
    with anyio.fail_after(HANG):
        generator = worker.count.options(num_returns="streaming").remote(2, "raise")
        async with stream(generator) as numbers:
            for _ in range(2):
                with pytest.raises(ValueError, match="after the numbers"):
                    async for number in numbers:
                        seen.append(number)
    assert seen == [0, 1]


async def test_bug_097_leaving_a_stream_early_ends_the_actors_generator(worker: Any) -> None:
    with anyio.fail_after(HANG):
        generator = worker.count.options(num_returns="streaming").remote(3, "hang")
        async with stream(generator) as numbers:
            async for number in numbers:
                if number == 2:
                    break
        await until(lambda: rests(worker))


async def test_a_cancelled_wait_for_an_item_loses_none(worker: Any) -> None:
    with anyio.fail_after(HANG):
        async with stream(worker.count.options(num_returns="streaming").remote(3)) as numbers:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(numbers)
            assert [number async for number in numbers] == [0, 1, 2]


async def test_a_cancelled_stream_ends_the_actors_generator(worker: Any) -> None:
    seen: list[int] = []
    with anyio.fail_after(HANG):
        with anyio.CancelScope() as scope:
            generator = worker.count.options(num_returns="streaming").remote(2, "hang")
            async with stream(generator) as numbers:
                async for number in numbers:
                    seen.append(number)
                    if number == 1:
                        scope.cancel()
        assert seen == [0, 1]
        await until(lambda: rests(worker))


# Actors that die


async def test_bug_089_an_actor_that_dies_fails_the_calls_in_flight_and_those_after() -> None:
    worker: Any = Worker.remote()
    failures: list[RayCallFailed] = []

    async def ask(method: Any, *args: Any) -> None:
        with pytest.raises(RayCallFailed) as caught:
            await call(method, *args)
        failures.append(caught.value)

    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, worker.hang)

            async def all_run() -> bool:
                return bool((await call(worker.state))["running"] == 3)

            await until(all_run)
            tasks.start_soon(ask, worker.die)
        await ask(worker.echo, 1)
    assert len(failures) == 5
    assert all(f.actor_gone and f.maybe_executed and f.retryable for f in failures)


async def test_an_actor_that_dies_in_a_stream_is_no_end_of_the_stream() -> None:
    worker: Any = Worker.remote()
    seen: list[int] = []
    with anyio.fail_after(HANG):
        generator = worker.count.options(num_returns="streaming").remote(2, "hang")
        async with stream(generator) as numbers:
            for _ in range(2):
                with pytest.raises(RayCallFailed):
                    async for number in numbers:
                        seen.append(number)
                        if number == 1:
                            ray.kill(worker)
    assert seen == [0, 1]


async def test_an_actor_that_is_restarted_answers_the_next_call() -> None:
    worker: Any = Worker.options(max_restarts=1).remote()
    with anyio.fail_after(HANG):
        with pytest.raises(RayCallFailed) as caught:
            await call(worker.die)

        async def answers() -> bool:
            try:
                return bool(await call(worker.echo, 1))
            except RayCallFailed:
                return False

        await until(answers)
    assert (caught.value.actor_gone, caught.value.retryable) == (False, True)
    assert caught.value.maybe_executed
    ray.kill(worker)


async def test_an_actor_that_can_not_be_made_never_ran_the_call() -> None:
    broken: Any = remote(BrokenActor).remote()
    with anyio.fail_after(HANG):
        with pytest.raises(RayCallFailed, match="no model here") as caught:
            await call(broken.ask)
    assert (caught.value.actor_gone, caught.value.maybe_executed) == (True, False)


async def test_a_call_to_an_actor_that_waits_for_resources_can_be_cancelled() -> None:
    worker: Any = Worker.options(num_cpus=1000).remote()
    with anyio.fail_after(HANG):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await call(worker.echo, 1)
        assert scope.cancelled_caught
    ray.kill(worker)


async def test_more_calls_than_the_actor_takes_were_never_run() -> None:
    worker: Any = Worker.options(max_pending_calls=1).remote()
    with anyio.fail_after(HANG):
        worker.hang.remote()
        with pytest.raises(RayCallFailed, match="PendingCallsLimitExceeded") as caught:
            await call(worker.hang)
    assert (caught.value.maybe_executed, caught.value.retryable) == (False, True)
    ray.kill(worker)


async def test_what_is_no_ref_is_named(worker: Any) -> None:
    with pytest.raises(TypeError, match="ref must be an ObjectRef, got 3"):
        await result(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator must be an ObjectRefGenerator"):
        async with stream(3):
            pass
    with pytest.raises(ValueError, match="grace must be > 0"):
        await result(ray.put(1), grace=0)


async def test_a_process_without_ray_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call ray\.init\(\) first"):
        check_initialized()


class StubbornActor:
    """Blocks its event loop, so that no cancellation gets through."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.at_it = False

    async def block(self) -> None:
        self.at_it = True
        self.go_on.wait(HANG)

    @method(concurrency_group="look")
    async def blocked(self) -> bool:
        return self.at_it

    @method(concurrency_group="look")
    async def let_go(self) -> None:
        self.go_on.set()


class BrokenActor:
    """Can't be made."""

    def __init__(self) -> None:
        raise RuntimeError("no model here")

    async def ask(self) -> None:
        """Is never asked."""
