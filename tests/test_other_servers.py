"""What is SGLang's, LMDeploy's and llama.cpp's own: options, names, and what they do that they should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rollnest import Attempt, PauseMode, Sampling
from rollnest.abc import FinishReason, Health
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed
from rollnest.testing.servers import Exchange, Fault, Refused
from rollnest_adapters.lmdeploy import LmdeployController

from .conformance import attempt
from .hand_clock import hand_backends
from .http_cases import LlamacppCase, LmdeployCase, SglangCase, SglangCumulativeCase

pytestmark = pytest.mark.anyio


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


FULL = Sampling(
    9,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    stop=("\n",),
    stop_token_ids=(5,),
)


def one_of(sampling: Sampling, affinity: str = "rollout-1") -> Attempt:
    return Attempt([1, 2], max_tokens=7, sampling=sampling, affinity=affinity)


def refusing(status: int) -> Any:
    """A route that fails."""

    async def route(exchange: Exchange) -> Any:
        raise Refused(status, {"success": False, "message": "no"})

    return route


# SGLang


async def test_sglang_is_asked_what_it_can_do() -> None:
    case = SglangCase(vocab_size=321, max_context=777, memory_saver=False)
    async with case.opened(stop_token_ids=[2]) as controller:
        known = controller.capabilities
    assert (known.vocab_size, known.max_context, known.logprobs) == (321, 777, "processed")
    assert known.sampling == {"min_tokens", "temperature", "stop", "stop_token_ids"}
    assert known.release_tags == frozenset()
    assert case.server.policy.passes == 0  # nothing is generated to find out
    async with case.opened(original_logprobs=True, vocab_size=300, max_context=500) as controller:
        known = controller.capabilities
    assert (known.vocab_size, known.max_context, known.logprobs) == (300, 500, "raw")
    assert known.sampling > {"top_p", "top_k", "min_p"}
    with pytest.raises(InferenceError, match=r"max_context is 800, the server's --context-length"):
        async with case.opened(max_context=800):
            pass


async def test_sglang_is_sent_its_own_words() -> None:
    case = SglangCase()
    async with case.opened(filters=True) as controller:
        one = one_of(FULL)
        await controller.generate(one)
        await controller.generate(one_of(Sampling(7), affinity="é"))
    full, plain = case.server.bodies
    assert full == {
        "rid": one.id,
        "input_ids": [1, 2],
        "sampling_params": {
            "max_new_tokens": 7,
            "min_new_tokens": 0,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "stop": ["\n"],
            "stop_token_ids": [5],
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": "rollnest-0",
    }
    assert plain["sampling_params"]["top_k"] == -1
    first, second = case.requests()
    assert first.headers["x-smg-routing-key"] == "rollout-1"
    assert "x-smg-routing-key" not in second.headers


async def test_a_deterministic_sglang_gets_a_seed_for_every_request() -> None:
    case = SglangCase(deterministic=True)
    async with case.opened() as controller:
        assert "seed" in controller.capabilities.sampling
        await controller.generate(one_of(Sampling(7, seed=5)))
        await controller.generate(one_of(Sampling(7)))
        await controller.generate(one_of(Sampling(7)))
    seeds = [body["sampling_params"]["sampling_seed"] for body in case.server.bodies]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


async def test_sglang_refuses_a_temperature_that_it_would_make_greedy() -> None:
    async with SglangCase().opened() as controller:
        with pytest.raises(UnsupportedSampling, match="temperature=1e-07"):
            await controller.generate(attempt([1], temperature=1e-7))


async def test_sglang_says_its_last_token_again_and_it_is_taken_once() -> None:
    case = SglangCase(streams=True)
    async with case.opened(stream_every=1) as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=3) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await case.let_run()
            await controller.abort([one.id])
        assert one.finish_reason is FinishReason.ABORT
        assert len(one.received) == 3


async def test_an_abort_of_sglang_with_a_status_is_a_failure() -> None:
    def busy(answer: Any) -> Any:
        answer["meta_info"]["finish_reason"] = {
            "type": "abort",
            "message": "queue is full",
            "status_code": 503,
        }
        return answer

    case = SglangCase()
    case.server.faults.append(Fault(edit=busy))
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="queue is full") as caught:
            await controller.generate(attempt(case.prompt(0)))
        assert caught.value.retryable


async def test_an_error_in_a_stream_of_sglang_is_one() -> None:
    case = SglangCase(streams=True)
    error = {"error": {"message": "context is too long", "code": 400}}
    case.server.faults.append(Fault(edit=lambda _: error))
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="context is too long") as caught:
            await controller.generate(attempt(case.prompt(0)))
        assert not caught.value.retryable


async def test_a_new_label_of_sglang_aborts_nothing() -> None:
    case = SglangCase()
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.pause(PauseMode.KEEP)
            await controller.update_weights("/models/other", 1)
            await controller.resume()
        assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("path", "status", "state"),
    [
        ("/update_weights_from_disk", 400, WeightsState.UNKNOWN),
        ("/update_weights_from_disk", 404, WeightsState.OLD),
        ("/update_weight_version", 400, WeightsState.UNKNOWN),
        ("/flush_cache", 500, WeightsState.UNKNOWN),
    ],
)
async def test_an_update_of_sglang_that_fails_says_what_it_holds(
    path: str, status: int, state: WeightsState
) -> None:
    case = SglangCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        case.server.overrides[f"POST {path}"] = refusing(status)
        with pytest.raises(WeightUpdateFailed, match=f"{path}: status {status}") as caught:
            await controller.update_weights("/models/other", 1)
        assert caught.value.weights is state
        case.server.overrides.clear()
        await controller.update_weights("/models/other", 1)
        await controller.resume()


async def test_a_flush_that_sglang_refuses_matters_only_to_frozen_requests() -> None:
    case = SglangCase()
    async with case.opened() as controller:
        case.server.overrides["POST /flush_cache"] = refusing(400)
        await controller.pause(PauseMode.ABORT)
        await controller.update_weights("/models/other", 1)
        await controller.resume()


async def test_health_of_sglang_in_a_pause() -> None:
    case = SglangCase()
    async with case.opened() as controller:
        async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
            tasks.start_soon(controller.generate, attempt(case.prompt(0)))
            await stall.reached()
            assert await controller.health() == Health(running=1, waiting=0, cache=0.25)
        await controller.pause(PauseMode.ABORT)
        assert (await controller.health()).running == 0
        case.server.overrides["GET /v1/loads"] = refusing(500)
        assert await controller.health() == Health()
        await controller.resume()


async def test_a_cumulative_stream_of_sglang_is_taken_once() -> None:
    case = SglangCumulativeCase(streams=True)
    async with case.opened(stream_every=1) as controller:
        one = attempt(case.prompt(0))
        await controller.generate(one)
        assert len(one.received) == 24
        assert controller.tokens_late == 0


# LMDeploy


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"abort_handling": False}, "must be started with --enable-abort-handling"),
        ({"logprobs_mode": None}, "must be started with --logprobs-mode raw_logprobs"),
    ],
    ids=repr,
)
async def test_a_missing_option_of_lmdeploy_is_named(options: dict[str, Any], says: str) -> None:
    case = LmdeployCase(**options)
    with pytest.raises(InferenceError, match=says) as caught:
        async with case.opened():
            pass
    assert not caught.value.retryable


async def test_lmdeploy_is_sent_its_own_words() -> None:
    case = LmdeployCase()
    async with case.opened() as controller:
        known = controller.capabilities
        await controller.generate(one_of(FULL))
        await controller.generate(one_of(Sampling(7)))
    assert known.logprobs == "raw"
    assert not known.sampling & {"seed", "min_tokens"}
    full, plain = case.server.bodies
    assert full.pop("session_id") + 1 == plain["session_id"]
    assert full == {
        "input_ids": [1, 2],
        "max_tokens": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "stop": ["\n"],
        "stop_token_ids": [5],
        "return_logprob": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert plain["top_k"] == 0


async def test_lmdeploy_refuses_what_it_would_not_honour() -> None:
    async with LmdeployCase().opened() as controller:
        with pytest.raises(UnsupportedSampling, match=r"temperature=2\.5"):
            await controller.generate(attempt([1], temperature=2.5))


async def test_lmdeploy_loads_no_directory() -> None:
    async with LmdeployCase().opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="give a callable that moves them") as caught:
            await controller.update_weights("/models/other", 1)
        assert caught.value.weights is WeightsState.OLD
        await controller.resume()


async def test_requests_wait_here_while_lmdeploy_is_paused() -> None:
    """It has no pause, and asleep it would answer at once, with nothing."""
    case = LmdeployCase()
    async with case.opened() as controller:
        one, two = attempt(case.prompt(0)), attempt(case.prompt(1))
        async with anyio.create_task_group() as tasks:
            await controller.pause(PauseMode.ABORT)
            tasks.start_soon(controller.generate, one)
            tasks.start_soon(controller.generate, two)
            await case.let_run()
            assert not case.server.bodies
            await controller.abort([two.id])
            await case.let_run()
            assert two.finish_reason is FinishReason.ABORT
            await controller.resume()
        assert one.finish_reason is FinishReason.LENGTH
    assert len(case.server.bodies) == 1


async def test_an_error_in_a_stream_of_lmdeploy_is_one() -> None:
    case = LmdeployCase(streams=True)
    error = {"error": {"message": "out of memory", "code": 500}}
    case.server.faults.append(Fault(edit=lambda _: error))
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="out of memory") as caught:
            await controller.generate(attempt(case.prompt(0)))
        assert caught.value.retryable


async def test_lmdeploy_is_released_at_once() -> None:
    async with LmdeployCase().opened() as controller:
        await controller.pause(PauseMode.ABORT)
        await controller.release(["kv"])
        with pytest.raises(InferenceError, match="not in parts"):
            await controller.release(["weights"])
        await controller.reload(["kv"])
        await controller.resume()


def test_what_lmdeploy_does_not_say_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="max_context must be >= 2, got 1"):
        LmdeployController("http://127.0.0.1:1", vocab_size=10, max_context=1)


# llama.cpp


async def test_llamacpp_is_asked_what_it_can_do() -> None:
    case = LlamacppCase(vocab_size=321, max_context=777)
    async with case.opened(stop_token_ids=[2]) as controller:
        known = controller.capabilities
        assert (known.vocab_size, known.max_context, known.logprobs) == (321, 777, "raw")
        assert known.release_tags == frozenset()
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(InferenceError, match=r"this llama\.cpp can't release kv"):
            await controller.release(["kv"])
    case.server.overrides["GET /slots"] = refusing(501)
    with pytest.raises(InferenceError, match="must be started with --slots"):
        async with case.opened():
            pass


async def test_llamacpp_is_sent_its_own_words() -> None:
    case = LlamacppCase()
    async with case.opened() as controller:
        await controller.generate(one_of(FULL))
        await controller.generate(one_of(Sampling(7, seed=2**40 + 3)))
    full, plain = case.server.bodies
    assert full == {
        "prompt": [1, 2],
        "n_predict": 7,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repeat_penalty": 1.0,
        "samplers": ["top_k", "top_p", "min_p", "temperature"],
        "stop": ["\n"],
        "n_probs": 1,
        "return_tokens": True,
        "stream": True,
    }
    assert 0 <= plain["seed"] < 2**32


async def test_a_stop_id_of_llamacpp_is_found_here_and_ends_the_request() -> None:
    case = LlamacppCase()
    async with case.opened() as controller:
        whole = attempt(case.prompt(0), max_tokens=2000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, whole)
        stop = whole.received.ids.tolist()[3]
        one = attempt(case.prompt(0), max_tokens=2000, stop_token_ids=[stop])
        await controller.generate(one)
        assert one.finish_reason is FinishReason.STOP
        assert one.received.ids.tolist() == whole.received.ids.tolist()[:4]
        assert not await case.open_requests(controller)
    assert case.server.policy.passes < 4000


async def test_a_pause_of_llamacpp_waits_until_it_has_noticed() -> None:
    case = LlamacppCase()
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
            tasks.start_soon(controller.generate, one)
            await stall.reached()
            await case.let_run()  # what it has made arrives
            await controller.pause(PauseMode.ABORT)
            assert not case.server.policy.decodings
        assert one.finish_reason is FinishReason.ABORT
        assert len(one.received) == 2
        await controller.resume()


async def test_llamacpp_loads_no_directory_but_may_be_restarted() -> None:
    async with LlamacppCase().opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="give a callable that restarts it"):
            await controller.update_weights("/models/other", 1)
        await controller.resume()


async def test_an_error_in_a_stream_of_llamacpp_is_one() -> None:
    case = LlamacppCase()
    error = {"error": {"message": "out of memory", "code": 500}}
    case.server.faults.append(Fault(edit=lambda _: error))
    async with case.opened() as controller:
        with pytest.raises(InferenceError, match="out of memory") as caught:
            await controller.generate(attempt(case.prompt(0)))
        assert caught.value.retryable


async def test_health_of_llamacpp() -> None:
    case = LlamacppCase()
    async with case.opened() as controller:
        async with anyio.create_task_group() as tasks, case.stall(after=2) as stall:
            tasks.start_soon(controller.generate, attempt(case.prompt(0)))
            await stall.reached()
            assert await controller.health() == Health(running=1)
