"""What is vLLM's own: its options, its names, its sleep, and what it does that it should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rollnest import Attempt, PauseMode, Sampling
from rollnest.abc import FinishReason, Health
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed
from rollnest.testing.servers import Exchange, Fault, Refused, VllmServer
from rollnest_adapters.vllm import VllmController

from .conformance import attempt
from .hand_clock import hand_backends
from .http_cases import VllmCase

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_connection_ages")]


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


def saying(text: bytes) -> Any:
    """A route that says so."""

    async def route(exchange: Exchange) -> Any:
        return text

    return route


# What it is started with


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"dev_mode": False},
            "must be started with the environment variable VLLM_SERVER_DEV_MODE=1",
        ),
        ({"scale_out": False}, "must be started with --enable-scale-out"),
        ({"logprobs_mode": "raw_logits"}, "start it with --logprobs-mode processed_logprobs"),
    ],
    ids=repr,
)
async def test_a_missing_option_is_named(options: dict[str, Any], says: str) -> None:
    server = VllmServer(**options)
    async with server.serve():
        with pytest.raises(InferenceError, match=says) as caught:
            async with VllmController(server.url):
                pass
    assert not caught.value.retryable


@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_the_mode_of_logprobs_is_declared(mode: str) -> None:
    case = VllmCase(logprobs_mode=f"{mode}_logprobs")
    async with case.opened() as controller:
        assert controller.capabilities.logprobs == mode


async def test_what_it_can_do_is_asked() -> None:
    server = VllmServer(vocab_size=321, max_context=777, sleep_mode=False)
    async with server.serve():
        async with VllmController(server.url, stop_token_ids=[2]) as controller:
            known = controller.capabilities
        assert (known.vocab_size, known.max_context) == (321, 777)
        assert known.stop_token_ids == {2}
        assert known.release_tags == frozenset()
        async with VllmController(server.url, vocab_size=300, max_context=500) as controller:
            known = controller.capabilities
        assert (known.vocab_size, known.max_context) == (300, 500)
        with pytest.raises(InferenceError, match=r"max_context is 800, the server's .* 777"):
            async with VllmController(server.url, max_context=800):
                pass
    assert not server.policy.decodings
    assert server.policy.passes == 0  # nothing is generated to find out


async def test_a_vocabulary_that_is_not_said_has_to_be_given() -> None:
    server = VllmServer()
    server.policy.vocab_size = 2**31  # so the probe is served
    async with server.serve():
        with pytest.raises(InferenceError, match="give vocab_size"):
            async with VllmController(server.url):
                pass


@pytest.mark.parametrize(
    "info",
    [b"null", b"{}", b'{"vllm_config": {"model_config": {"max_model_len": "x"}}}', b"<html>"],
)
async def test_garbage_about_itself_is_refused(info: bytes) -> None:
    server = VllmServer()
    server.overrides["GET /server_info"] = saying(info)
    async with server.serve():
        with pytest.raises(InferenceError, match="unusable"):
            async with VllmController(server.url):
                pass


async def test_a_pause_that_somebody_left_behind_is_ended() -> None:
    server = VllmServer()
    async with server.serve():
        server.policy.pause("keep")
        async with VllmController(server.url) as controller:
            await controller.generate(attempt([1, 2]))


@pytest.mark.parametrize(("label", "version"), [("default", 4), ("0", 0), ("17", 17)])
async def test_the_label_of_its_weights_is_a_version(label: str, version: int) -> None:
    server = VllmServer()
    server.policy.label = label
    async with server.serve(), VllmController(server.url, version=4) as controller:
        assert await controller.version() == version


async def test_a_label_of_somebody_else_is_refused() -> None:
    server = VllmServer()
    server.policy.label = "step-3"
    async with server.serve():
        with pytest.raises(InferenceError, match="calls its weights 'step-3'"):
            async with VllmController(server.url):
                pass


# What is sent


async def test_sampling_is_sent_in_its_words() -> None:
    server = VllmServer()
    sampling = Sampling(
        9,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        stop=("\n",),
        stop_token_ids=(5,),
        seed=3,
    )
    one = Attempt([1, 2], max_tokens=7, sampling=sampling, affinity="rollout-1")
    async with server.serve(), VllmController(server.url) as controller:
        await controller.generate(one)
        await controller.generate(Attempt([3], max_tokens=1, sampling=Sampling(1), affinity="é"))
    full, plain = server.bodies
    assert full == {
        "request_id": one.id,
        "token_ids": [1, 2],
        "sampling_params": {
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "stop": ["\n"],
            "stop_token_ids": [5],
            "seed": 3,
            "logprobs": 0,
        },
        "cache_salt": "rollnest-0",
    }
    assert plain["sampling_params"] == {
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": 0,
    }
    first, second = server.http.requests[-2:]
    assert first.headers["x-request-id"] == one.id
    assert first.headers["x-session-id"] == "rollout-1"
    assert "x-session-id" not in second.headers


@pytest.mark.parametrize("temperature", [0.005, 2.5])
async def test_a_temperature_that_it_would_change_is_refused(temperature: float) -> None:
    server = VllmServer()
    async with server.serve(), VllmController(server.url) as controller:
        with pytest.raises(UnsupportedSampling, match=f"temperature={temperature}"):
            await controller.generate(attempt([1], temperature=temperature))


async def test_prefixes_are_cached_apart_by_version() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        await controller.update_weights("/models/other", 3)
        await controller.resume()
        one = attempt(case.prompt(0))
        one.version = 3
        await controller.generate(one)
    assert case.server.bodies[-1]["cache_salt"] == "rollnest-3"


# Streams


async def test_an_error_in_the_middle_of_a_stream_keeps_what_came() -> None:
    def fail(part: Any) -> Any:
        if part["choices"][0]["finish_reason"] is None:
            return part
        return {"error": {"message": "EngineCore died", "type": "x", "param": None, "code": 500}}

    case = VllmCase(streams=True)
    case.server.faults.append(Fault(edit=fail))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        with pytest.raises(InferenceError, match="EngineCore died") as caught:
            await controller.generate(one)
        assert caught.value.retryable
        assert len(one.received) >= 1
        assert one.finish_reason is None


async def test_a_stream_without_done_is_whole() -> None:
    case = VllmCase(streams=True)
    case.server.faults.append(Fault(done=False))
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        await controller.generate(one)
        assert one.finish_reason is FinishReason.LENGTH


async def test_streams_keep_their_connection() -> None:
    case = VllmCase(streams=True)
    async with case.opened() as controller:
        for number in range(5):
            await controller.generate(attempt(case.prompt(number)))
    assert case.server.http.connections == 2  # one for control calls


async def test_weights_that_change_under_a_stream_unasked_are_found_out() -> None:
    case = VllmCase(streams=True)
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=6) as stall:

                async def generate() -> None:
                    with pytest.raises(InferenceError, match="holds weights of version 0"):
                        await controller.generate(one)

                one.version = 2
                tasks.start_soon(generate)
                await stall.reached()


# Weights


async def test_a_server_that_was_restarted_with_older_weights_gets_no_request() -> None:
    case = VllmCase()
    async with case.server.serve() as first:
        port = int(first.url.rsplit(":", 1)[1])
        controller = VllmController(case.server.url)
        await controller.__aenter__()
        await controller.pause(PauseMode.ABORT)
        await controller.update_weights("/models/other", 1)
        await controller.resume()
    with pytest.raises(InferenceError, match="Connect"):
        await controller.generate(attempt(case.prompt(0)))
    case.server.policy.restart()
    one = attempt(case.prompt(0))
    one.version = 1
    async with case.server.serve(port):
        before = len(case.server.bodies)
        for _ in range(2):
            with pytest.raises(InferenceError, match="version 0, the policy is at 1") as caught:
                await controller.generate(one)
            assert caught.value.retryable
        assert len(case.server.bodies) == before
        await controller.pause(PauseMode.ABORT)
        await controller.update_weights("/models/other", 2)
        await controller.resume()
        two = attempt(case.prompt(0))
        two.version = 2
        await controller.generate(two)
        assert set(two.received.versions) == {2}
        await controller.__aexit__(None, None, None)


async def test_tokens_of_older_weights_are_not_recorded() -> None:
    """Also where the connection did not break, as behind a router."""
    case = VllmCase()
    async with case.opened() as controller:
        one = attempt(case.prompt(0))
        one.version = 1
        with pytest.raises(InferenceError, match="version 0, the policy is at 1") as caught:
            await controller.generate(one)
        assert caught.value.retryable
        assert len(one.received) == 0


async def test_a_directory_that_does_not_load_leaves_weights_that_nobody_knows() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match=r"'/nope'.*collective_rpc") as caught:
            await controller.update_weights("/nope", 1)
        assert caught.value.weights is WeightsState.UNKNOWN
        await controller.update_weights("/models/other", 1)
        await controller.resume()


@pytest.mark.parametrize(
    ("path", "status", "state"),
    [
        ("/collective_rpc", 500, WeightsState.UNKNOWN),
        ("/collective_rpc", 404, WeightsState.OLD),
        ("/update_weight_version", 500, WeightsState.UNKNOWN),
        ("/reset_prefix_cache", 500, WeightsState.UNKNOWN),
    ],
)
async def test_an_update_that_fails_says_what_the_server_holds(
    path: str, status: int, state: WeightsState
) -> None:
    async def fail(exchange: Exchange) -> Any:
        raise Refused(status, {"error": "no"})

    case = VllmCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        case.server.overrides[f"POST {path}"] = fail
        with pytest.raises(WeightUpdateFailed, match=f"{path}: status {status}") as caught:
            await controller.update_weights("/models/other", 1)
        assert caught.value.weights is state
        case.server.overrides.clear()
        await controller.update_weights("/models/other", 1)
        await controller.resume()


async def test_a_server_that_is_gone_has_its_old_weights() -> None:
    case = VllmCase()
    async with case.server.serve():
        controller = VllmController(case.server.url)
        await controller.__aenter__()
        await controller.pause(PauseMode.ABORT)
    with pytest.raises(WeightUpdateFailed, match="Connect") as caught:
        await controller.update_weights("/models/other", 1)
    assert caught.value.weights is WeightsState.OLD
    await controller.__aexit__(None, None, None)


async def test_a_cache_that_is_not_dropped_matters_only_to_frozen_requests() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        case.server.policy.forget = lambda *, running: False  # type: ignore[method-assign]
        await controller.pause(PauseMode.ABORT)
        await controller.update_weights("/models/other", 1)
        await controller.resume()
        one = attempt(case.prompt(0))
        one.version = 1
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=3) as stall:
                tasks.start_soon(controller.generate, one)
                await stall.reached()
                await controller.pause(PauseMode.KEEP)
            with pytest.raises(WeightUpdateFailed, match="did not drop") as caught:
                await controller.update_weights("/models/base", 2)
            assert caught.value.weights is WeightsState.UNKNOWN
            await controller.resume()


# Memory


async def test_waking_up_does_not_let_it_go_on() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        await controller.release(["kv", "weights"])
        assert case.asleep == {"weights", "kv_cache"}
        await controller.reload(["weights"])
        assert case.asleep == {"kv_cache"}
        await controller.reload(["kv"])
        assert case.server.policy.paused == "abort"
        await controller.resume()


async def test_the_cache_alone_can_be_released() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        await controller.release(["kv"])
        assert case.asleep == {"kv_cache"}
        with pytest.raises(InferenceError, match="with the cache or before it"):
            await controller.release(["weights"])
        await controller.reload(["kv", "weights"])
        assert case.asleep == set()
        await controller.release(["weights"])
        await controller.reload(["weights"])
        assert case.asleep == set()
        await controller.resume()


async def test_what_is_in_flight_keeps_its_memory() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=2) as stall:
                tasks.start_soon(controller.generate, attempt(case.prompt(0)))
                await stall.reached()
                await controller.pause(PauseMode.KEEP)
                with pytest.raises(InferenceError, match="nothing in flight; 1 attempts are"):
                    await controller.release(["kv"])
            await controller.resume()


async def test_without_sleep_mode_nothing_is_released() -> None:
    case = VllmCase(sleep_mode=False)
    async with case.opened() as controller:
        await controller.pause(PauseMode.ABORT)
        with pytest.raises(InferenceError, match="this vLLM can't release kv"):
            await controller.release(["kv"])
        await controller.resume()


# Health


async def test_health_tells_the_load() -> None:
    case = VllmCase()
    async with case.opened() as controller:
        async with anyio.create_task_group() as tasks:
            async with case.stall(after=2) as stall:
                for number in range(3):
                    tasks.start_soon(controller.generate, attempt(case.prompt(number)))
                await stall.reached()
                assert await controller.health() == Health(running=3, waiting=0, cache=0.25)
        await controller.pause(PauseMode.ABORT)
        await controller.health()
        case.server.broken = 503
        with pytest.raises(InferenceError, match="503"):
            await controller.health()
        case.server.broken = None
        await controller.resume()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running -4\nvllm:kv_cache_usage_perc x\n",
    ],
)
async def test_a_load_that_makes_no_sense_is_not_believed(text: bytes) -> None:
    case = VllmCase()
    async with case.opened() as controller:
        case.server.overrides["GET /metrics"] = saying(text)
        assert await controller.health() == Health()


async def test_load_of_several_engines_is_summed() -> None:
    case = VllmCase()
    running = "vllm:num_requests_running"
    text = f'{running}{{engine="0"}} 2.0\n{running}{{engine="1"}} 3\n'
    async with case.opened() as controller:
        case.server.overrides["GET /metrics"] = saying(text.encode())
        assert (await controller.health()).running == 5


# Bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stream_every": 0}, "stream_every must be >= 1, got 0"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"max_context": 1}, "max_context must be >= 2, got 1"),
        ({"version": -1}, "version must be >= 0, got -1"),
        ({"control_timeout": 0}, "control_timeout must be > 0, got 0"),
        ({"update_timeout": -1.0}, "update_timeout must be > 0, got -1.0"),
        ({"max_connections": 0}, "max_connections must be >= 1, got 0"),
        ({"silence": 0}, "silence must be > 0 and finite, got 0"),
        ({"max_response_bytes": 0}, "max_response_bytes must be >= 1, got 0"),
    ],
    ids=repr,
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        VllmController("http://127.0.0.1:8000", **options)


def test_the_root_is_asked_for() -> None:
    with pytest.raises(ValueError, match="without /v1"):
        VllmController("http://127.0.0.1:8000/v1")
    assert "closed" in repr(VllmController("http://127.0.0.1:8000"))
