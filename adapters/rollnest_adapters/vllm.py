r"""The controller of a vLLM server (0.32 and later): token ids in and out over `/inference/v1/generate`.

The server is to be started like this, and bound to where nobody else can reach it, because vLLM's control routes ask
for no key:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm \
        --logprobs-mode processed_logprobs

How rollnest's words become the server's is in `docs/topics/servers.md`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import msgspec

from rollnest.abc import Attempt, Capabilities, FinishReason, Health, PauseMode, ReleaseTag
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed

from ._http import HttpError
from ._http_controller import Answer, HttpController, Open, Span, decoded, unusable

__all__ = ["VllmController"]

_GENERATE = "/inference/v1/generate"
_PREFIX = (
    "generate-tokens-"  # the server puts it before our id, and knows the request by both together
)
_LOGPROBS: Mapping[str, Literal["raw", "processed"]] = {
    "raw_logprobs": "raw",
    "processed_logprobs": "processed",
}
_TAGS: Mapping[ReleaseTag, str] = {"kv": "kv_cache", "weights": "weights"}


class _Logprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob]


class _Versions(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Logprobs
    stop_reason: int | str | None = None
    weight_versions: list[_Versions] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Fault | None = None


class _ModelConfig(msgspec.Struct):
    max_model_len: int
    logprobs_mode: str
    generation_config: str = "vllm"
    enable_sleep_mode: bool = False
    skip_tokenizer_init: bool = False


class _Config(msgspec.Struct):
    model_config: _ModelConfig


class _Info(msgspec.Struct):
    vllm_config: _Config


class _Weights(msgspec.Struct):
    weight_version: str


class _Success(msgspec.Struct):
    success: bool


_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)
_info = msgspec.json.Decoder(_Info)
_weights = msgspec.json.Decoder(_Weights)
_success = msgspec.json.Decoder(_Success)


class VllmController(HttpController):
    """A vLLM server as the policy.

    Enter it with `async with`, or give it to an `Engine`, which does. It asks the server what it can do and refuses one
    that was started without an option it needs, by name. The server is its own while it is entered: its pauses, its
    weights' label and its memory are changed and, on the way out, put in order.

    The weights' label at the server is rollnest's version as a number; `"default"`, how vLLM calls the weights it was
    started with, stands for `version`. Cached prefixes are kept apart by version.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.

    Args:
        base_url: The server's root, such as `http://127.0.0.1:8000`; without `/v1`.
        api_key: The server's `--api-key`; never shown.
        version: Weight version of the weights that the server was started with.
        stream_every: Has the server send tokens as they come, so many at a time, so that a connection that breaks costs
            few of them and a long partial is read before the abort. `None` takes the whole answer at its end, which
            costs both sides less.
        stop_token_ids: Ids that end a turn by themselves, the model's end-of-sequence ids. The server applies its own
            anyway; without a tokenizer for the engine they are named here.
        vocab_size: Ids are below it; `None` asks the server.
        max_context: Most tokens of prompt and response; `None` asks the server.
        silence: Seconds that the server may say nothing to a request, pauses not counted; `None` is no limit. Without
            `stream_every` a whole answer has to come within it.
        control_timeout: Seconds for each control call.
        update_timeout: Seconds for loading weights.
        max_connections: Most requests at once; more of them wait here. `None` leaves that to `Capacity(turns=)`.
        max_response_bytes: Most bytes of one answer.
        tls: Trusts another authority than the system's.
    """

    server = "vLLM"
    finish_reasons: ClassVar[Mapping[str, FinishReason]] = MappingProxyType(
        {
            "stop": FinishReason.STOP,
            "length": FinishReason.LENGTH,
            "abort": FinishReason.ABORT,
            "repetition": FinishReason.STOP,
        }
    )

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        stream_every: int | None = None,
        stop_token_ids: Collection[int] = (),
        vocab_size: int | None = None,
        max_context: int | None = None,
        silence: float | None = 600.0,
        control_timeout: float = 60.0,
        update_timeout: float = 600.0,
        max_connections: int | None = None,
        max_response_bytes: int = 256 * 1024 * 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            base_url,
            api_key=api_key,
            version=version,
            stream_every=stream_every,
            stop_token_ids=stop_token_ids,
            vocab_size=vocab_size,
            max_context=max_context,
            silence=silence,
            control_timeout=control_timeout,
            update_timeout=update_timeout,
            max_connections=max_connections,
            max_response_bytes=max_response_bytes,
            tls=tls,
        )

    async def _probe(self) -> Capabilities:
        try:
            info = decoded(
                _info,
                await self._call("/server_info", method="GET", params={"config_format": "json"}),
            )
        except HttpError as error:
            raise self._lacking(error, "the environment variable VLLM_SERVER_DEV_MODE=1") from error
        model = info.vllm_config.model_config
        logprobs = _LOGPROBS.get(model.logprobs_mode)
        if logprobs is None:
            raise InferenceError(
                f"vLLM reports {model.logprobs_mode!r} instead of logprobs; start it with --logprobs-mode "
                "processed_logprobs (or raw_logprobs)"
            )
        vocab_size = await self._find_vocab_size() if self._vocab_size is None else self._vocab_size
        await self._call("/resume")  # whoever paused it before is gone
        return Capabilities(
            vocab_size=vocab_size,
            max_context=self._context(model.max_model_len, "--max-model-len"),
            logprobs=logprobs,
            stop_token_ids=self._stop_token_ids,
            sampling={
                "min_tokens",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "stop",
                "stop_token_ids",
                "seed",
            },
            version_spans=True,
            pause_modes={PauseMode.ABORT, PauseMode.KEEP},
            release_tags={"kv", "weights"} if model.enable_sleep_mode else (),
        )

    async def _find_vocab_size(self) -> int:
        """From the error about a token that no vocabulary has: nothing is generated for it."""
        sampling = {"max_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}
        said = "it generated instead"
        try:
            await self._call(_GENERATE, {"token_ids": [0], "sampling_params": sampling})
        except HttpError as error:
            if error.status in (403, 404):
                raise self._lacking(error, "--enable-scale-out") from error
            if error.status != 400:
                raise
            said = str(error)
            if found := re.search(r"[Vv]ocabulary size: (\d+)", said):
                return int(found[1])
        raise InferenceError(
            f"vLLM does not say how large its vocabulary is; give vocab_size ({said})"
        )

    def _lacking(self, error: HttpError, option: str) -> InferenceError:
        if error.status in (403, 404, 405):
            return InferenceError(f"vLLM must be started with {option}: {error}")
        return error

    def _check_sampling(self, attempt: Attempt) -> None:
        temperature = attempt.sampling.temperature
        if temperature > 2 or 0 < temperature < 0.01:
            raise UnsupportedSampling(
                f"vLLM can't honour temperature={temperature!r}; it takes 0 (greedy) and 0.01 to 2"
            )

    def _request(self, request: Open) -> tuple[str, Any, Mapping[str, str]]:
        attempt, sampling = request.attempt, request.attempt.sampling
        params: dict[str, Any] = {
            "max_tokens": attempt.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or 0.0,
            "logprobs": 0,  # of the sampled token only
        }
        if sampling.min_tokens:
            params["min_tokens"] = sampling.min_tokens
        if sampling.stop:
            params["stop"] = sampling.stop
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        body: dict[str, Any] = {
            "request_id": attempt.id,
            "token_ids": attempt.prompt_ids.tolist(),
            "sampling_params": params,
            # Weights are part of what a cached prefix was computed with.
            "cache_salt": f"rollnest-{self._version}",
        }
        if self._stream_every is not None:
            body["stream"] = True
            # Never with detokenize=False: the server's engine dies of that.
            params["stream_interval"] = self._stream_every
        headers = {"x-request-id": attempt.id}
        if attempt.affinity.isascii() and attempt.affinity.isprintable() and attempt.affinity:
            headers["x-session-id"] = attempt.affinity
        return _GENERATE, body, headers

    def _answer(self, body: bytes) -> Answer:
        reply = decoded(_reply, body)
        usage = reply.usage
        return self._read(reply.choices, None if usage is None else usage.prompt_tokens)

    def _part(self, data: bytes) -> Answer:
        event = decoded(_event, data)
        if event.error is not None:
            code = event.error.code
            raise HttpError(
                f"vLLM failed in the middle of a stream: {self._controls.plain(event.error.message)}",
                retryable=not (isinstance(code, int) and 400 <= code < 500),
                status=code if isinstance(code, int) else 500,
            )
        return self._read(event.choices, None) if event.choices else Answer()

    def _read(self, choices: list[_Choice], prompt_tokens: int | None) -> Answer:
        if len(choices) != 1:
            raise unusable(f"{len(choices)} choices, 1 was asked for")
        (choice,) = choices
        content = choice.logprobs.content
        if any(given.token_id != i for given, i in zip(content, choice.token_ids, strict=False)):
            raise unusable("its logprobs are of other tokens than its token_ids")
        if choice.finish_reason == "error":
            raise HttpError("vLLM's engine failed the request", retryable=True, status=500)
        spans = choice.weight_versions
        detail = choice.finish_reason if choice.finish_reason == "repetition" else None
        if choice.stop_reason is not None:
            detail = f"stop {choice.stop_reason!r}"
        return Answer(
            ids=choice.token_ids,
            logprobs=[given.logprob for given in content],
            finish=choice.finish_reason,
            detail=detail,
            spans=None if spans is None else [Span(s.version, s.start, s.end) for s in spans],
            prompt_tokens=prompt_tokens,
        )

    async def _abort(self, ids: set[str]) -> None:
        await self._call("/abort_requests", {"request_ids": [_PREFIX + i for i in sorted(ids)]})

    async def _pause(self, mode: PauseMode) -> None:
        keep = mode is PauseMode.KEEP
        # The cache is dropped when weights change, not for every pause.
        params = {"mode": "keep" if keep else "abort", "clear_cache": "false"}
        await self._call("/pause", params=params)

    async def _resume(self) -> None:
        await self._call("/resume")

    async def _load(self, path: str, version: int) -> None:
        await self._call(
            "/collective_rpc",
            {
                "method": "reload_weights",
                "kwargs": {"weights_path": path, "is_checkpoint_format": True},
            },
            within=self._update_timeout,
        )

    async def _label(self, version: int) -> None:
        await self._call("/update_weight_version", {"new_version": str(version)})
        if "kv" in self._released:
            return  # there is no cache
        reset = await self._call("/reset_prefix_cache", params={"reset_running_requests": "true"})
        # What is cached is found by its salt, so only what is frozen would go on with older weights' keys and values.
        if not decoded(_success, reset).success and self._open:
            raise WeightUpdateFailed(
                "vLLM did not drop what frozen requests have cached of older weights",
                weights=WeightsState.UNKNOWN,
            )

    async def _reported(self) -> int | None:
        return self._version_of(
            decoded(_weights, await self._call("/weight_info", method="GET")).weight_version
        )

    async def _health(self) -> Health:
        await self._call("/health", method="GET")
        try:
            metrics = (await self._call("/metrics", method="GET")).decode("utf-8", "replace")
        except HttpError:
            return Health()
        cache = _figure(metrics, "vllm:kv_cache_usage_perc")
        running = _figure(metrics, "vllm:num_requests_running")
        waiting = _figure(metrics, "vllm:num_requests_waiting")
        return Health(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            cache=None if cache is None else min(1.0, cache),
        )

    async def _release(self, tags: set[ReleaseTag]) -> None:
        if "weights" not in tags:
            await self._call("/release_kv_cache_memory")
        elif self._released:
            raise InferenceError("vLLM releases its weights with the cache or before it, not after")
        else:
            await self._call("/sleep", params={"level": "1", "mode": "keep"})

    async def _reload(self, tags: set[ReleaseTag], rest: set[ReleaseTag]) -> None:
        if rest:
            (tag,) = tags
            await self._call("/wake_up", params={"tags": _TAGS[tag]})
            return
        await self._call("/wake_up")
        # Once everything is awake vLLM goes on by itself.
        await self._pause(self._paused or PauseMode.ABORT)


def _figure(metrics: str, name: str) -> float | None:
    """Sum of a Prometheus gauge over its labels; `None` if it isn't there."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    try:
        values = [float(value) for value in found]
    except ValueError:
        return None
    return sum(values) if values and all(0 <= v < 1e12 for v in values) else None
