"""What every `InferenceController` must do, as plain async checks over a small harness.

A test module for one controller builds a `ControllerCase` and runs all of `CHECKS` with it:

    @pytest.mark.parametrize("check", CHECKS, ids=check_name)
    async def test_conformance(check: Check) -> None:
        await check(MyCase())

The checks use greedy decoding where they compare ids. They wait for events only; `HANG` is a guard, not a measure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from rollnest import Attempt, PauseMode, Sampling
from rollnest.abc import FinishReason, InferenceController, WeightSource
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed

HANG = 60.0

MAX_TOKENS = 24


class Stall(Protocol):
    """A policy that stops in the middle of its work."""

    async def reached(self) -> None:
        """Returns once it has stopped."""
        ...


class ControllerCase(ABC):
    """How to open one kind of controller, and how to make it slow."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[InferenceController]:
        """Returns a new controller over a new policy: the same weights each time, version 0."""

    @abstractmethod
    def prompt(self, number: int) -> list[int]:
        """Returns a prompt; no two numbers below 64 have the same."""

    @abstractmethod
    def stall(self, *, after: int) -> AbstractAsyncContextManager[Stall]:
        """Lets the policy sample `after` tokens of a single request, then stalls it until the block is left."""

    @abstractmethod
    def passes(self) -> int:
        """How many forward passes, or steps of a server, have begun."""

    @abstractmethod
    def new_weights(self) -> WeightSource:
        """Returns weights whose greedy answers differ."""

    @abstractmethod
    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        """Which requests the controller, and the server behind it, hold once it has heard all that it was told."""

    @abstractmethod
    def late_tokens(self, controller: InferenceController) -> int:
        """How many tokens came for attempts that were aborted, cut or given up."""

    async def let_run(self) -> None:
        """Gives tasks and threads a chance to do what they should not."""
        for _ in range(20):
            await anyio.to_thread.run_sync(bool)
            await anyio.lowlevel.checkpoint()


Check = Callable[[ControllerCase], Awaitable[None]]

CHECKS: list[Check] = []


def check_name(check: Check) -> str:
    """Returns a check's name for test ids."""
    return getattr(check, "__name__", "check").removeprefix("check_")


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def attempt(
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
) -> Attempt:
    """Returns an attempt, greedy unless said otherwise."""
    sampling = Sampling(max_tokens, temperature=temperature, stop_token_ids=tuple(stop_token_ids))
    return Attempt(prompt_ids, max_tokens=max_tokens, sampling=sampling, vocab_size=vocab_size)


async def answer(
    controller: InferenceController, prompt_ids: Sequence[int], *, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """Returns a whole greedy answer."""
    whole = attempt(prompt_ids, max_tokens=max_tokens)
    await controller.generate(whole)
    return whole.received.ids.tolist()


@_check
async def check_capabilities_are_known_once_entered(case: ControllerCase) -> None:
    async with case.open() as controller:
        known = controller.capabilities
        assert known.vocab_size > max(case.prompt(0))
        assert known.max_context >= len(case.prompt(0)) + MAX_TOKENS
        assert all(0 <= i < known.vocab_size for i in known.stop_token_ids)
        assert await controller.version() in (0, None)


@_check
async def check_greedy_is_repeatable(case: ControllerCase) -> None:
    async with case.open() as controller:
        first = await answer(controller, case.prompt(0))
        assert await answer(controller, case.prompt(0)) == first
        assert len(first) == MAX_TOKENS


@_check
async def check_length_at_the_cap_exactly(case: ControllerCase) -> None:
    async with case.open() as controller:
        for cap in (1, 2, 7):
            one = attempt(case.prompt(1), max_tokens=cap)
            await controller.generate(one)
            assert one.finish_reason is FinishReason.LENGTH
            assert len(one.received) == cap


@_check
async def check_stop_includes_the_stop_id(case: ControllerCase) -> None:
    async with case.open() as controller:
        whole = await answer(controller, case.prompt(2))
        stop = whole[len(whole) // 2]
        one = attempt(case.prompt(2), stop_token_ids=[stop])
        await controller.generate(one)
        assert one.finish_reason is FinishReason.STOP
        assert one.received.ids.tolist() == whole[: whole.index(stop) + 1]


@_check
async def check_stop_at_the_cap_is_stop(case: ControllerCase) -> None:
    async with case.open() as controller:
        whole = await answer(controller, case.prompt(2))
        one = attempt(
            case.prompt(2), max_tokens=whole.index(whole[-1]) + 1, stop_token_ids=[whole[-1]]
        )
        await controller.generate(one)
        assert one.finish_reason is FinishReason.STOP


@_check
async def check_sampled_tokens_have_logprobs_and_versions(case: ControllerCase) -> None:
    async with case.open() as controller:
        vocab_size = controller.capabilities.vocab_size
        one = attempt(case.prompt(3), temperature=1.0, vocab_size=vocab_size)
        await controller.generate(one)
        received = one.received
        assert 1 <= len(received) <= MAX_TOKENS
        assert len(received.logprobs) == len(received.ids) == len(received.versions)
        assert all(logprob < 1e-4 for logprob in received.logprobs)
        assert min(received.logprobs) < 0  # sampled at temperature 1, so not all are certain
        assert set(received.versions) == {0}


@_check
async def check_sixty_four_at_once_all_complete(case: ControllerCase) -> None:
    async with case.open() as controller:
        alone = await answer(controller, case.prompt(5), max_tokens=8)
        many = [attempt(case.prompt(number), max_tokens=8) for number in range(64)]
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                for one in many:
                    tasks.start_soon(controller.generate, one)
        assert all(one.finish_reason is FinishReason.LENGTH for one in many)
        assert all(len(one.received) == 8 for one in many)
        assert many[5].received.ids.tolist() == alone
        assert not await case.open_requests(controller)


@_check
async def check_abort_is_a_result_that_keeps_the_partial(case: ControllerCase) -> None:
    """BUG-031: the abort's reply is read, its tokens are kept."""
    async with case.open() as controller:
        whole = await answer(controller, case.prompt(0))
        one = attempt(case.prompt(0))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=4) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        partial = one.received.ids.tolist()
        assert 1 <= len(partial) < MAX_TOKENS
        assert partial == whole[: len(partial)]
        assert not await case.open_requests(controller)


@_check
async def check_resume_from_a_partial_goes_on_as_if_uninterrupted(case: ControllerCase) -> None:
    async with case.open() as controller:
        prompt = case.prompt(4)
        whole = await answer(controller, prompt)
        one = attempt(prompt)
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=5) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.abort(None)
        partial = one.received.ids.tolist()
        rest = await answer(controller, [*prompt, *partial], max_tokens=MAX_TOKENS - len(partial))
        assert partial + rest == whole


@_check
async def check_abort_of_one_leaves_the_others(case: ControllerCase) -> None:
    async with case.open() as controller:
        one, other = attempt(case.prompt(0)), attempt(case.prompt(1))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                tasks.start_soon(controller.generate, other)
                await stall.reached()
                await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        assert other.finish_reason is FinishReason.LENGTH
        assert other.received.ids.tolist() == await answer(controller, case.prompt(1))


@_check
async def check_abort_of_all_ends_all(case: ControllerCase) -> None:
    async with case.open() as controller:
        many = [attempt(case.prompt(number)) for number in range(8)]
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
                for one in many:
                    tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.abort(None)
        assert [one.finish_reason for one in many] == [FinishReason.ABORT] * 8
        assert not await case.open_requests(controller)


@_check
async def check_abort_of_unknown_ids_and_twice_changes_nothing(case: ControllerCase) -> None:
    async with case.open() as controller:
        one = attempt(case.prompt(0))
        await controller.abort(None)
        await controller.abort(["0" * 32])
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.abort(["0" * 32])
                await controller.abort([one.id, "0" * 32])
                await controller.abort([one.id])
                await controller.abort(None)
        assert one.finish_reason is FinishReason.ABORT
        await controller.abort([one.id])
        await answer(controller, case.prompt(0), max_tokens=2)


@_check
async def check_cancel_in_flight_leaves_nothing(case: ControllerCase) -> None:
    """BUG-092: the server stops working on answers that nobody reads; what was committed stays."""
    async with case.open() as controller:
        one, other = attempt(case.prompt(0)), attempt(case.prompt(1))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                tasks.start_soon(controller.generate, other)
                await stall.reached()
                tasks.cancel_scope.cancel()
            assert one.finish_reason is None
            held = len(one.received), len(other.received)
            # The next answer's forward passes come after whatever was in the air.
            await answer(controller, case.prompt(2), max_tokens=4)
        assert (len(one.received), len(other.received)) == held
        assert not await case.open_requests(controller)


@_check
async def check_cancel_at_once_leaves_nothing(case: ControllerCase) -> None:
    """BUG-092: a cancellation right after the request was sent reaches the server too."""
    async with case.open() as controller:
        one = attempt(case.prompt(0))
        with anyio.fail_after(HANG):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await controller.generate(one)
            assert scope.cancelled_caught
            held = len(one.received)
            await answer(controller, case.prompt(2), max_tokens=4)
            assert not await case.open_requests(controller)
        assert one.finish_reason is None
        assert len(one.received) == held < MAX_TOKENS


@_check
async def check_late_tokens_are_counted_and_not_committed(case: ControllerCase) -> None:
    async with case.open() as controller:
        one = attempt(case.prompt(0))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()  # inside a forward pass: its token will be late
                await controller.abort([one.id])
            held = len(one.received)
            await answer(controller, case.prompt(1), max_tokens=2)
        assert len(one.received) == held
        assert case.late_tokens(controller) >= 1


@_check
async def check_tokens_of_a_given_up_attempt_are_not_recorded(case: ControllerCase) -> None:
    async with case.open() as controller:
        one = attempt(case.prompt(0))
        held = 0
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                held = len(one.received)  # a stream has brought some
                one.close()
                await controller.abort([one.id])
        assert len(one.received) == held
        assert case.late_tokens(controller) >= 1


@_check
async def check_no_forward_pass_while_paused(case: ControllerCase) -> None:
    async with case.open() as controller:
        one, during, passes = attempt(case.prompt(0)), attempt(case.prompt(1)), 0
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                async with case.stall(after=3) as stall:
                    tasks.start_soon(controller.generate, one)
                    await stall.reached()
                    await controller.abort(None)
                await controller.pause(PauseMode.ABORT)
                passes, held = case.passes(), len(one.received)
                tasks.start_soon(controller.generate, during)
                await case.let_run()
                assert (case.passes(), len(one.received)) == (passes, held)
                assert len(during.received) == 0
                assert during.finish_reason is None
                await controller.resume()
        assert during.finish_reason is FinishReason.LENGTH
        assert case.passes() > passes


@_check
async def check_frozen_requests_go_on_under_new_weights(case: ControllerCase) -> None:
    """BUG-063: nothing is aborted by an update in `KEEP`; each token has the version of the weights that made it."""
    async with case.open() as controller:
        known = controller.capabilities
        if PauseMode.KEEP not in known.pause_modes or not known.version_spans:
            return
        whole = await answer(controller, case.prompt(0))
        one = attempt(case.prompt(0))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                async with anyio.create_task_group() as pausing, case.stall(after=3) as stall:
                    tasks.start_soon(controller.generate, one)
                    await stall.reached()
                    pausing.start_soon(controller.pause, PauseMode.KEEP)
                    await case.let_run()  # it is asked for in the middle of a forward pass
                passes = case.passes()
                await case.let_run()
                assert case.passes() == passes
                assert one.finish_reason is None
                await controller.update_weights(case.new_weights(), 1)
                assert case.passes() == passes
                await controller.resume()
        assert one.finish_reason is FinishReason.LENGTH
        received = one.received
        (old, start, stop), (new, again, end) = received.version_runs
        assert (old, start, new, end) == (0, 0, 1, MAX_TOKENS)
        assert 3 <= stop == again < MAX_TOKENS
        assert received.ids.tolist()[:stop] == whole[:stop]
        assert received.ids.tolist()[stop:] != whole[stop:]


@_check
async def check_resume_is_idempotent_and_leaves_no_flag(case: ControllerCase) -> None:
    """BUG-024: nothing of a pause survives it."""
    async with case.open() as controller:
        with anyio.fail_after(HANG):
            await controller.resume()
            for _ in range(3):
                await controller.pause(PauseMode.ABORT)
                await controller.pause(PauseMode.ABORT)
                await controller.resume()
                await controller.resume()
                one = attempt(case.prompt(0), max_tokens=3)
                await controller.generate(one)
                assert one.finish_reason is FinishReason.LENGTH


@_check
async def check_update_changes_version_and_answers(case: ControllerCase) -> None:
    async with case.open() as controller:
        with anyio.fail_after(HANG):
            before = await answer(controller, case.prompt(0))
            await controller.pause(PauseMode.ABORT)
            await controller.update_weights(case.new_weights(), 1)
            await controller.resume()
            assert await controller.version() in (1, None)
            one = attempt(case.prompt(0))
            one.version = 1  # as the engine's attempts after an update
            await controller.generate(one)
        assert one.received.ids.tolist() != before
        assert set(one.received.versions) == {1}


@_check
async def check_update_outside_a_pause_is_refused(case: ControllerCase) -> None:
    async with case.open() as controller:
        before = await answer(controller, case.prompt(0))
        with pytest.raises(WeightUpdateFailed, match="paused") as caught:
            await controller.update_weights(case.new_weights(), 1)
        assert caught.value.weights is WeightsState.OLD
        assert await controller.version() in (0, None)
        assert await answer(controller, case.prompt(0)) == before


@_check
async def check_release_and_reload_change_nothing(case: ControllerCase) -> None:
    async with case.open() as controller:
        tags = controller.capabilities.release_tags
        if not tags:
            return
        with anyio.fail_after(HANG):
            before = await answer(controller, case.prompt(0))
            await controller.pause(PauseMode.ABORT)
            passes = case.passes()
            for _ in range(2):
                await controller.release(tags)
            with pytest.raises(InferenceError, match="released"):
                await controller.resume()
            with pytest.raises(InferenceError, match="released"):
                await controller.generate(attempt(case.prompt(0)))
            await case.let_run()
            assert case.passes() == passes
            for _ in range(2):
                await controller.reload(tags)
            await controller.resume()
            assert await controller.version() in (0, None)
            assert await answer(controller, case.prompt(0)) == before


@_check
async def check_an_update_comes_between_weights_and_cache(case: ControllerCase) -> None:
    async with case.open() as controller:
        if len(controller.capabilities.release_tags) < 2:
            return
        with anyio.fail_after(HANG):
            before = await answer(controller, case.prompt(0))
            await controller.pause(PauseMode.ABORT)
            await controller.release(["kv", "weights"])
            with pytest.raises((WeightUpdateFailed, InferenceError), match="released"):
                await controller.update_weights(case.new_weights(), 1)
            await controller.reload(["weights"])
            await controller.update_weights(case.new_weights(), 1)
            await controller.reload(["kv"])
            await controller.resume()
            one = attempt(case.prompt(0))
            one.version = 1
            await controller.generate(one)
        assert one.received.ids.tolist() != before
        assert set(one.received.versions) == {1}


@_check
async def check_release_outside_a_pause_is_refused(case: ControllerCase) -> None:
    async with case.open() as controller:
        tags = controller.capabilities.release_tags
        if not tags:
            return
        before = await answer(controller, case.prompt(0))
        with pytest.raises(InferenceError, match="paused"):
            await controller.release(tags)
        assert await answer(controller, case.prompt(0)) == before


@_check
async def check_leaving_while_released_ends_and_leaves_the_weights(case: ControllerCase) -> None:
    with anyio.fail_after(HANG):
        async with case.open() as controller:
            before = await answer(controller, case.prompt(0))
            await controller.pause(PauseMode.ABORT)
            await controller.release(controller.capabilities.release_tags)
        async with case.open() as controller:
            assert await answer(controller, case.prompt(0)) == before


@_check
async def check_cancelled_pause_is_taken_back(case: ControllerCase) -> None:
    async with case.open() as controller:
        one = attempt(case.prompt(0))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                async with case.stall(after=2) as stall:
                    tasks.start_soon(controller.generate, one)
                    await stall.reached()
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        await controller.pause(PauseMode.ABORT)
                await controller.resume()
        assert one.finish_reason is FinishReason.LENGTH


@_check
async def check_leaving_with_requests_in_flight_ends_them(case: ControllerCase) -> None:
    many = [attempt(case.prompt(number)) for number in range(4)]
    ended: list[str] = []

    async def generate(controller: InferenceController, one: Attempt) -> None:
        try:
            await controller.generate(one)
        except InferenceError:
            assert one.finish_reason is None
        ended.append(one.id)

    with anyio.fail_after(HANG):
        async with (
            anyio.create_task_group() as tasks,
            case.open() as controller,
            case.stall(after=2) as stall,
        ):
            for one in many:
                tasks.start_soon(generate, controller, one)
            await stall.reached()
    assert sorted(ended) == sorted(one.id for one in many)
    assert not await case.open_requests(controller)
    with pytest.raises(InferenceError):
        await controller.generate(attempt(case.prompt(0)))


@_check
async def check_health_is_told_at_any_time(case: ControllerCase) -> None:
    one = attempt(case.prompt(0))
    with anyio.fail_after(HANG):
        async with case.open() as controller:
            async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                busy = await controller.health()
                assert busy.running != 0
                await controller.abort([one.id])
            await controller.pause(PauseMode.ABORT)
            await controller.health()
            if tags := controller.capabilities.release_tags:
                await controller.release(tags)
                await controller.health()
                await controller.reload(tags)
            await controller.resume()
            idle = await controller.health()
            assert not idle.running
            assert not idle.waiting
        with pytest.raises(InferenceError):
            await controller.health()


@_check
async def check_leaving_while_paused_ends(case: ControllerCase) -> None:
    with anyio.fail_after(HANG):
        async with case.open() as controller:
            await controller.pause(PauseMode.ABORT)
