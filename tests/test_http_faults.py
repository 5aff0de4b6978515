"""What real servers do to their clients: each HTTP controller takes it, and the engine above it goes on.

By the list of pitfalls of the field's servers, and by public faults of its engines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollnest import Attempt, Engine, PauseMode, Sampling, Status
from rollnest.abc import FinishReason
from rollnest.errors import EngineBroken, InferenceError, WeightsState, WeightUpdateFailed
from rollnest.testing import RecordingInstrument, assert_conserved, expected_token
from rollnest.testing.servers import Fault
from rollnest_adapters._http_controller import HttpController

from .conformance import attempt
from .hand_clock import advance, hand_backends
from .helpers import spec
from .http_cases import CASES, HttpCase

pytestmark = pytest.mark.anyio


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> HttpCase:
    return CASES[request.param]()


class Impatient(RecordingInstrument):
    """Lets the time pass for which the engine waits after a request has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = anyio.Event()

    def turn_ended(self, attempt: Attempt) -> None:
        super().turn_ended(attempt)
        if attempt.finish_reason is None:
            self.failed.set()

    async def run(self) -> None:
        while True:
            await self.failed.wait()
            self.failed = anyio.Event()
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            await advance(5.0)


async def one_group(case: HttpCase, **options: Any) -> tuple[Any, Any]:
    """A group of one sample through an engine; the batch and the engine's figures."""
    controller = case.make(case.server.url, **options)
    impatient = Impatient()
    task = spec(group_size=1, sampling=Sampling(6))
    batch = figures = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(impatient.run)
        async with Engine(controller, task, instruments=[impatient]) as engine:
            batch = await engine.next_batch(1)
            figures = engine.statistics()
            assert_conserved(engine)
        tasks.cancel_scope.cancel()
    return batch, figures


# A request that fails for a reason that may pass


PASSING = {
    "500": Fault(status=500, body={"error": "out of memory"}),
    "502": Fault(status=502, body=b"<html>bad gateway</html>"),
    "503": Fault(status=503),
    "429": Fault(status=429),
    "408": Fault(status=408),
    "dropped at once": Fault(drop="at once"),
    "reset at once": Fault(drop="at once", reset=True),
    "garbage": Fault(raw=b"\x16\x03\x01 hello?\r\n\r\n"),
    "cut answer": Fault(drop="body"),
    "reset in the head": Fault(drop="head", reset=True),
    "dropped after 3 tokens": Fault(drop=3),
    "reset after 1 token": Fault(drop=1, reset=True),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=list(PASSING))
async def test_it_costs_one_retry(case: HttpCase, fault: Fault) -> None:
    in_a_stream = isinstance(fault.drop, int)
    if (in_a_stream and not case.streams) or (fault.drop in ("head", "body") and case.streams):
        return
    case.server.faults.append(fault)
    async with case.server.serve():
        batch, figures = await one_group(case)
    (sample,) = batch.groups[0].samples
    assert sample.status is Status.COMPLETED
    (segment,) = sample.segments
    whole = segment.response.ids.tolist()
    assert whole == continuation(segment.prompt_ids.tolist(), 6)
    assert figures.tasks["task"].retries == 1
    bodies = case.server.bodies
    if in_a_stream:  # what had come was kept, and not asked for again
        kept = len(ids_of(bodies[1])) - len(ids_of(bodies[0]))
        assert (0 if fault.reset else 1) <= kept <= 4  # a reset may overtake what was sent
    assert len(bodies) == 2


def ids_of(body: dict[str, Any]) -> list[int]:
    ids: list[int] = body.get("token_ids") or body.get("input_ids") or body.get("prompt") or []
    return ids


def continuation(prompt: list[int], count: int, *, weights: int = 0) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(
            expected_token(ids, vocab_size=1000, stop_id=0, stop_every=10**9, version=weights)
        )
    return ids[len(prompt) :]


async def test_bug_084_what_may_have_arrived_is_aborted_before_it_is_sent_again(
    case: HttpCase,
) -> None:
    case.server.faults.append(Fault(drop="at once"))
    async with case.server.serve():
        batch, _ = await one_group(case)
    assert batch.groups[0].samples[0].status is Status.COMPLETED
    if case.can_abort:
        first, second = (case.name_of(request) for request in case.requests())
        assert first != second
        assert case.server.aborts == [[first]]
        calls = [path for _, path in case.server.calls]
        again = len(calls) - 1 - calls[::-1].index(case.server.generates)
        assert calls.index(case.abort_path) < again


async def test_bug_085_what_is_wrong_for_good_is_asked_once(case: HttpCase) -> None:
    case.server.fault = Fault(status=400, body={"error": "this model has no such thing"})
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        with pytest.raises(InferenceError, match="no such thing") as caught:
            await controller.generate(one)
        assert not caught.value.retryable
        assert not caught.value.maybe_executed
        assert len(case.server.bodies) == 1


async def test_bug_085_a_server_that_asks_to_wait_is_let_wait(case: HttpCase) -> None:
    case.server.faults.append(Fault(status=429, headers={"retry-after": "7"}))
    async with case.opened() as controller:
        failed = anyio.Event()

        async def generate() -> None:
            with pytest.raises(InferenceError, match="status 429") as caught:
                await controller.generate(attempt(case.prompt(0)))
            assert caught.value.retryable
            failed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while not case.server.bodies:
                await anyio.lowlevel.checkpoint()
            await case.let_run()
            await advance(6.9)
            assert not failed.is_set()
            await advance(0.2)
            await failed.wait()


async def test_bug_086_the_controller_tries_once(case: HttpCase) -> None:
    case.server.fault = Fault(status=503)
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="status 503") as caught:
            await controller.generate(attempt(case.prompt(0)))
        assert caught.value.retryable
        assert len(case.server.bodies) == 1


async def test_bug_088_a_server_that_dies_ends_the_run_with_the_cause(case: HttpCase) -> None:
    serving, served = anyio.CancelScope(), anyio.Event()

    async def serve() -> None:
        with serving:
            async with case.server.serve():
                served.set()
                await anyio.sleep_forever()

    async def kill() -> None:
        while len(case.server.policy.decodings) < 4:
            await anyio.lowlevel.checkpoint()
        serving.cancel()
        while True:
            await advance(1.0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await served.wait()
        controller = case.make(case.server.url)
        with case.server.stalled(after=2), pytest.raises(EngineBroken) as caught:
            async with Engine(controller, spec(group_size=4), outage=60.0) as engine:
                tasks.start_soon(kill)
                await engine.next_batch(1)
        assert any("Connect" in str(cause) for cause in caught.value.causes)
        assert controller.open_requests == ()
        tasks.cancel_scope.cancel()


async def test_a_silent_server_is_aborted_and_asked_again(case: HttpCase) -> None:
    case.server.faults.append(Fault(silent=True))
    async with case.opened(silence=30.0) as controller:
        one = attempt(case.prompt(0))
        failed = anyio.Event()

        async def generate() -> None:
            with pytest.raises(InferenceError, match=r"said nothing for 30\.0 s") as caught:
                await controller.generate(one)
            assert caught.value.retryable
            failed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while not case.server.bodies:
                await anyio.lowlevel.checkpoint()
            await case.let_run()
            await advance(31.0)
            await failed.wait()
        assert bool(case.server.aborts) is case.can_abort
        await controller.generate(attempt(case.prompt(0)))


# Answers that can't be used


@pytest.mark.parametrize("name", sorted({lie for make in CASES.values() for lie in make().lies()}))
async def test_bug_091_a_lie_is_named_and_nothing_of_it_is_kept(case: HttpCase, name: str) -> None:
    if name not in case.lies():
        return
    change, says = case.lies()[name]
    case.server.faults.append(Fault(edit=change))
    async with case.opened(**({"stream_every": 100} if case.streams else {})) as controller:
        known = controller.capabilities
        one = attempt(case.prompt(0), max_tokens=6, vocab_size=known.vocab_size)
        with pytest.raises(InferenceError, match=says) as caught:
            await controller.generate(one)
        assert not caught.value.retryable
        assert one.finish_reason is None
        assert len(one.received) < (6 if case.streams else 1)
        await controller.generate(attempt(case.prompt(0)))  # the next one is served
        assert controller.open_requests == ()


async def test_an_answer_without_a_reason_is_no_answer(case: HttpCase) -> None:
    case.server.faults.append(Fault(edit=case.null_reason))
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="reason"):
            await controller.generate(attempt(case.prompt(0)))


async def test_an_abort_without_a_reason_is_an_abort(case: HttpCase) -> None:
    if not case.can_abort:
        return
    case.server.faults.append(Fault(edit=case.null_reason))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        assert len(one.received) == 3


async def test_an_abort_that_lacks_logprobs_keeps_what_has_them(case: HttpCase) -> None:
    if not case.can_abort or case.streams:
        return
    case.server.faults.append(Fault(edit=case.short_logprobs))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=5) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        assert one.received.ids.tolist() == continuation(case.prompt(0), 5)[:4]


async def test_tokens_beyond_the_cap_are_not_recorded(case: HttpCase) -> None:
    case.server.faults.append(Fault(overrun=3))
    async with case.opened() as controller:
        one = attempt(case.prompt(0), max_tokens=24)
        await controller.generate(one)
        assert one.received.ids.tolist() == continuation(case.prompt(0), 24)
        assert controller.tokens_late == 3
        assert one.finish_reason is FinishReason.LENGTH


# Aborts


async def test_an_abort_that_comes_before_the_server_knows_the_request_is_sent_again(
    case: HttpCase,
) -> None:
    """Aborts race with admission everywhere; the engine asks again until the turn has come back."""
    if not case.can_abort:
        return
    admitted = anyio.Event()
    case.server.faults.append(Fault(admitted=admitted))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks:
            with case.server.stalled(after=3):
                tasks.start_soon(controller.generate, one)
                while not case.server.bodies:
                    await anyio.lowlevel.checkpoint()
                await controller.abort(None)
                assert one.finish_reason is None
                admitted.set()
                while not case.server.policy.decodings:
                    await anyio.lowlevel.checkpoint()
                await controller.abort([one.id])
                await case.let_run()
                assert one.finish_reason is FinishReason.ABORT
        assert case.server.aborts == [case.server.aborts[0]] * 2


async def test_a_deaf_server_is_cut_off_and_stops(case: HttpCase) -> None:
    case.server.faults.append(Fault(deaf=-1))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await controller.abort([one.id])
            await case.let_run()
            assert one.finish_reason is (None if case.can_abort else FinishReason.ABORT)
            tasks.cancel_scope.cancel()
        assert not await case.open_requests(controller)  # its connection was closed


async def test_an_abort_that_takes_one_more_token_keeps_it(case: HttpCase) -> None:
    if not case.can_abort:
        return
    case.server.faults.append(Fault(slow=True))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        assert one.received.ids.tolist() == continuation(case.prompt(0), 4)


async def test_many_cancelled_requests_are_told_of_in_few_calls(case: HttpCase) -> None:
    if not case.can_abort:
        return
    async with case.opened() as controller:
        many = [attempt(case.prompt(i)) for i in range(50)]
        async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
            for one in many:
                tasks.start_soon(controller.generate, one)
            await stall.reached()
            tasks.cancel_scope.cancel()
        told = [id_ for ids in case.server.aborts for id_ in ids or ()]
        assert len(told) == len(set(told)) <= 50
        assert len(told) == 50 or None in case.server.aborts  # that is all
        assert len(case.server.aborts) <= (3 if case.one_abort_for_all else 50)


async def test_what_waits_for_a_connection_is_aborted_without_being_sent(case: HttpCase) -> None:
    async with case.opened(max_connections=1) as controller:
        first, second = attempt(case.prompt(0)), attempt(case.prompt(1))
        async with anyio.create_task_group() as tasks, case.stall(after=2):
            tasks.start_soon(controller.generate, first)
            while not case.server.policy.decodings:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(controller.generate, second)
            await case.let_run()
            await controller.abort([second.id])
            await case.let_run()
            assert second.finish_reason is FinishReason.ABORT
            assert first.finish_reason is None
        assert first.finish_reason is FinishReason.LENGTH
        assert len(case.server.bodies) == 1


async def test_control_calls_do_not_wait_for_generation(case: HttpCase) -> None:
    async with case.opened(max_connections=1) as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await controller.health()
            await controller.version()
            await controller.abort(None)
        assert one.finish_reason is FinishReason.ABORT


# Pauses and weights


async def test_a_pause_is_no_silence(case: HttpCase) -> None:
    async with case.opened(silence=30.0) as controller:
        if PauseMode.KEEP not in controller.capabilities.pause_modes:
            return
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.pause(PauseMode.KEEP)
            await advance(10_000.0)
            await controller.resume()
        assert one.finish_reason is FinishReason.LENGTH


async def test_frozen_requests_use_nothing_of_older_weights(case: HttpCase) -> None:
    async with case.opened() as controller:
        if PauseMode.KEEP not in controller.capabilities.pause_modes:
            return
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.pause(PauseMode.KEEP)
            await controller.update_weights("/models/other", 1)
            await controller.resume()
        old = continuation(case.prompt(0), 3)
        new = continuation([*case.prompt(0), *old], 21, weights=1)
        assert one.received.ids.tolist() == old + new
        fresh = attempt(case.prompt(0))
        fresh.version = 1
        await controller.generate(fresh)
        assert fresh.received.ids.tolist() == continuation(case.prompt(0), 24, weights=1)


async def test_weights_that_somebody_moved_get_their_label(case: HttpCase) -> None:
    async with case.opened() as controller:

        async def move() -> None:
            case.server.policy.load("/models/other")

        await controller.pause(PauseMode.ABORT)
        await controller.update_weights(move, 5)
        await controller.resume()
        assert await controller.version() in (5, None)
        one = attempt(case.prompt(0))
        one.version = 5
        await controller.generate(one)
        assert set(one.received.versions) == {5}


async def test_weights_in_memory_are_refused(case: HttpCase) -> None:
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="got a dict") as caught:
            await controller.update_weights({}, 1)
        assert caught.value.weights is WeightsState.OLD
        await controller.resume()


async def test_a_version_never_decreases(case: HttpCase) -> None:
    async with case.opened(version=3) as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="version must be >= the present 3"):
            await controller.update_weights("/models/other", 2)
        await controller.resume()


async def test_a_callable_that_fails_leaves_weights_that_nobody_knows(case: HttpCase) -> None:
    async def fail() -> None:
        raise OSError("NCCL is sad")

    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="NCCL is sad") as caught:
            await controller.update_weights(fail, 1)
        assert caught.value.weights is WeightsState.UNKNOWN
        await controller.resume()


async def test_bug_074_a_resume_that_failed_is_repeated(case: HttpCase) -> None:
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        if case.server.policy.paused is None:
            return  # a gate of its own, that nothing can fail
        case.server.broken = 503
        with pytest.raises(InferenceError, match="503") as caught:
            await controller.resume()
        assert caught.value.retryable
        case.server.broken = None
        await controller.resume()
        assert case.server.policy.paused is None
        await controller.generate(attempt(case.prompt(0)))


# Entering and leaving


async def test_leaving_a_server_that_is_gone_ends(case: HttpCase) -> None:
    one = attempt(case.prompt(0))

    async def generate(controller: HttpController) -> None:
        with pytest.raises(InferenceError):
            await controller.generate(one)

    async with anyio.create_task_group() as tasks:
        serving = AsyncExitStack()
        await serving.enter_async_context(case.server.serve())
        controller = case.make(case.server.url)
        async with serving:
            await controller.__aenter__()
            await controller.pause(PauseMode.ABORT)
            tasks.start_soon(generate, controller)
            await case.let_run()
            assert controller.open_requests == (one.id,)
        await controller.__aexit__(None, None, None)
        assert not controller.open_requests


async def test_a_server_that_is_not_there_is_said_at_the_door(case: HttpCase) -> None:
    async with case.server.serve():
        url = case.server.url
    controller = case.make(url)
    with pytest.raises(InferenceError, match="Connect") as caught:
        await controller.__aenter__()
    assert caught.value.retryable
    with pytest.raises(InferenceError, match="not open"):
        await controller.generate(attempt(case.prompt(0)))
    with pytest.raises(InferenceError, match="not entered yet"):
        _ = controller.capabilities


async def test_a_controller_is_entered_again_and_not_twice(case: HttpCase) -> None:
    async with case.server.serve():
        controller = case.make(case.server.url)
        for _ in range(2):
            async with controller:
                await controller.generate(attempt(case.prompt(0)))
                with pytest.raises(RuntimeError, match="open already"):
                    await controller.__aenter__()


async def test_a_wrong_key_is_refused_and_not_shown() -> None:
    for make in CASES.values():
        case = make()
        case.server = case.make_server(api_key="sk-right-0123456789")
        async with case.server.serve():
            async with case.make(case.server.url, api_key="sk-right-0123456789") as controller:
                await controller.generate(attempt(case.prompt(0)))
            with pytest.raises(InferenceError, match="401") as caught:
                async with case.make(case.server.url, api_key="sk-wrong-0123456789") as controller:
                    pass
        assert "sk-" not in str(caught.value) + repr(controller)


async def test_what_does_not_fit_is_not_sent(case: HttpCase) -> None:
    async with case.opened() as controller:
        most = controller.capabilities.max_context
        with pytest.raises(InferenceError, match="do not fit into the context"):
            await controller.generate(attempt([1] * (most - 3), max_tokens=4))
        with pytest.raises(InferenceError, match="the prompt is empty"):
            await controller.generate(attempt([]))
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=1) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            with pytest.raises(InferenceError, match="in flight already"):
                await controller.generate(one)
        assert len(case.server.bodies) == 1


async def test_a_long_answer_is_read_in_a_thread(case: HttpCase) -> None:
    async with case.opened() as controller:
        most = controller.capabilities.max_context - 3
        one = attempt(case.prompt(0), max_tokens=most)
        await controller.generate(one)
        assert one.received.ids.tolist() == continuation(case.prompt(0), most)
