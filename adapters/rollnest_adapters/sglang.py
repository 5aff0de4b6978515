r"""The controller of an SGLang server (0.5.23 and later): token ids in and out over its own `/generate`.

The server is to be started like this; its control routes are open to whoever reaches it, unless it has an admin key:

    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 python -m sglang.launch_server --model-path MODEL \
        --incremental-streaming-output

How rollnest's words become the server's is in `docs/topics/servers.md`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import anyio
import msgspec

from rollnest.abc import (
    Attempt,
    Capabilities,
    FinishReason,
    Health,
    PauseMode,
    ReleaseTag,
    SamplingField,
)
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed

from ._http import HttpError
from ._http_controller import Answer, HttpController, Open, Span, decoded, unusable

__all__ = ["SglangController"]

_ABORTS_AT_ONCE = 32  # calls of one id each
_TAGS: Mapping[ReleaseTag, str] = {"kv": "kv_cache", "weights": "weights"}


class _Versions(msgspec.Struct):
    version: str
    start: int
    end: int


class _Reason(msgspec.Struct):
    type: str
    message: str | None = None
    matched: Any = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None
    output_token_logprobs: list[tuple[float, int, Any]] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_versions: list[_Versions] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Fault | None = None


class _Info(msgspec.Struct):
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False


class _Model(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _Weights(msgspec.Struct):
    weight_version: str


class _Load(msgspec.Struct):
    num_running_reqs: int | None = None
    num_waiting_reqs: int | None = None
    token_usage: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)
_info = msgspec.json.Decoder(_Info)
_models = msgspec.json.Decoder(_Models)
_weights = msgspec.json.Decoder(_Weights)
_loads = msgspec.json.Decoder(_Loads)


class SglangController(HttpController):
    """An SGLang server as the policy.

    Enter it with `async with`, or give it to an `Engine`, which does. The server is its own while it is entered: an
    abort of everything ends requests of others, too.

    SGLang's logprobs are of the distribution after temperature and before `top_p`, `top_k` and `min_p`; so attempts
    can't set these, unless `filters` says that their logprobs don't matter. A server with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`, which can't be asked for, reports raw ones.

    Frozen requests (`KEEP`) are retracted: they keep their tokens and are computed anew when they go on, under the
    weights of then.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.

    Args:
        base_url: The server's root, such as `http://127.0.0.1:30000`; without `/v1`.
        api_key: The server's `--api-key`; with an `--admin-api-key` that one. Never shown.
        version: Weight version of the weights that the server was started with.
        stream_every: Has the server send tokens as they come, so many at a time; `None` takes the whole answer at its
            end. Without `--incremental-streaming-output` each part holds everything before it again.
        original_logprobs: Whether the server was started with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
        filters: Lets attempts set `top_p`, `top_k` and `min_p`, for evaluation.
        stop_token_ids: Ids that end a turn by themselves, the model's end-of-sequence ids.
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

    server = "SGLang"
    finish_reasons: ClassVar[Mapping[str, FinishReason]] = MappingProxyType(
        {
            "stop": FinishReason.STOP,
            "length": FinishReason.LENGTH,
            "abort": FinishReason.ABORT,
        }
    )

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        stream_every: int | None = None,
        original_logprobs: bool = False,
        filters: bool = False,
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
        self._original = original_logprobs
        self._filters = filters or original_logprobs
        self._deterministic = False

    async def _probe(self) -> Capabilities:
        info = decoded(_info, await self._call("/server_info", method="GET"))
        self.cumulative: bool = not info.incremental_streaming_output
        self._deterministic = info.enable_deterministic_inference
        models = decoded(_models, await self._call("/v1/models", method="GET")).data
        if not models:
            raise InferenceError("SGLang serves no model")
        await self._call("/continue_generation", {})  # whoever paused it before is gone
        sampling: set[SamplingField] = {"min_tokens", "temperature", "stop", "stop_token_ids"}
        if self._filters:
            sampling |= {"top_p", "top_k", "min_p"}
        if self._deterministic:
            sampling.add("seed")
        tags: set[ReleaseTag] = {"kv"} if info.enable_memory_saver else set()
        if tags and info.enable_weights_cpu_backup:
            tags.add("weights")
        return Capabilities(
            vocab_size=self._vocab_size or await self._find_vocab_size(),
            max_context=self._context(models[0].max_model_len, "--context-length"),
            logprobs="raw" if self._original else "processed",
            stop_token_ids=self._stop_token_ids,
            sampling=sampling,
            version_spans=True,
            pause_modes={PauseMode.ABORT, PauseMode.KEEP},
            release_tags=tags,
        )

    async def _find_vocab_size(self) -> int:
        """From the error about a token that no vocabulary has: nothing is generated for it."""
        said = "it generated instead"
        try:
            await self._call(
                "/generate",
                {
                    "input_ids": [0],
                    "sampling_params": {"max_new_tokens": 1},
                    "return_logprob": True,
                    "token_ids_logprob": [2**31 - 1],
                },
            )
        except HttpError as error:
            if error.status != 400:
                raise
            said = str(error)
            if found := re.search(r"valid range is \[0, (\d+)\)", said):
                return int(found[1])
        raise InferenceError(
            f"SGLang does not say how large its vocabulary is; give vocab_size ({said})"
        )

    def _check_sampling(self, attempt: Attempt) -> None:
        if 0 < attempt.sampling.temperature < 1e-6:
            raise UnsupportedSampling(
                f"SGLang can't honour temperature={attempt.sampling.temperature!r}; it would be greedy"
            )

    def _request(self, request: Open) -> tuple[str, Any, Mapping[str, str]]:
        attempt, sampling = request.attempt, request.attempt.sampling
        params: dict[str, Any] = {
            "max_new_tokens": attempt.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p or 0.0,
        }
        if sampling.stop:
            params["stop"] = sampling.stop
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if self._deterministic:
            # Without a seed every request would get the same one, and the samples of a group would be equal.
            seed = sampling.seed if isinstance(sampling.seed, int) else int(attempt.id[:8], 16)
            params["sampling_seed"] = seed % 2**31
        body: dict[str, Any] = {
            "rid": attempt.id,  # of fixed length: the server aborts by prefix
            "input_ids": attempt.prompt_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            # Weights are part of what a cached prefix was computed with.
            "extra_key": f"rollnest-{self._version}",
        }
        if self._stream_every is not None:
            body["stream"] = True
            params["stream_interval"] = self._stream_every
        headers: dict[str, str] = {}
        if attempt.affinity.isascii() and attempt.affinity.isprintable() and attempt.affinity:
            headers["x-smg-routing-key"] = attempt.affinity
        return "/generate", body, headers

    def _answer(self, body: bytes) -> Answer:
        return self._read(decoded(_reply, body).meta_info)

    def _part(self, data: bytes) -> Answer:
        event = decoded(_event, data)
        if event.error is not None:
            raise self._refused(event.error.message, event.error.code)
        if event.meta_info is None:
            raise unusable("an event with neither meta_info nor error")
        return self._read(event.meta_info)

    def _refused(self, message: str, code: Any) -> HttpError:
        return HttpError(
            f"SGLang failed the request: {self._controls.plain(message)}",
            retryable=not (isinstance(code, int) and 400 <= code < 500),
            status=code if isinstance(code, int) else 500,
        )

    def _read(self, meta: _Meta) -> Answer:
        reason, detail = meta.finish_reason, None
        if reason is not None:
            detail = reason.message if reason.matched is None else f"stop {reason.matched!r}"
            if reason.type == "abort" and reason.status_code is not None:
                raise self._refused(reason.message or "aborted", reason.status_code)
        # Tokens are taken from the logprobs: so they are aligned, also where output_ids is not.
        given = meta.output_token_logprobs
        if given is None:
            if meta.completion_tokens and (reason is None or reason.type != "abort"):
                raise unusable("output_token_logprobs is null")
            given = []
        spans = meta.weight_versions
        return Answer(
            ids=[token for _, token, _ in given],
            logprobs=[logprob for logprob, _, _ in given],
            finish=None if reason is None else reason.type,
            detail=None if detail is None else self._controls.plain(detail),
            spans=None if spans is None else [Span(s.version, s.start, s.end) for s in spans],
            prompt_tokens=meta.prompt_tokens,
            total=meta.completion_tokens,
        )

    async def _abort(self, ids: set[str]) -> None:
        if len(ids) > 1 and ids >= set(self._open):
            await self._call("/abort_request", {"rid": "", "abort_all": True})
            return
        limit = anyio.CapacityLimiter(_ABORTS_AT_ONCE)
        errors: list[InferenceError] = []

        async def one(id_: str) -> None:
            async with limit:
                try:
                    await self._call("/abort_request", {"rid": id_, "abort_all": False})
                except InferenceError as error:
                    errors.append(error)

        async with anyio.create_task_group() as tasks:
            for id_ in ids:
                tasks.start_soon(one, id_)
        if errors:
            raise errors[0]

    async def _pause(self, mode: PauseMode) -> None:
        keep = mode is PauseMode.KEEP
        await self._call("/pause_generation", {"mode": "retract" if keep else "abort"})

    async def _resume(self) -> None:
        await self._call("/continue_generation", {})

    async def _load(self, path: str, version: int) -> None:
        # The cache is dropped by a call of its own: if that is refused here, the update counts as failed.
        body = {
            "model_path": path,
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": False,
            "keep_pause": True,
        }
        try:
            await self._call("/update_weights_from_disk", body, within=self._update_timeout)
        except HttpError as error:
            if error.status == 400:  # how it says that it failed, at whatever point
                raise WeightUpdateFailed(
                    f"SGLang did not load {path!r}: {error}", weights=WeightsState.UNKNOWN
                ) from error
            raise

    async def _label(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._call("/update_weight_version", body)
        if "kv" in self._released:
            return  # there is no cache
        try:
            await self._call("/flush_cache")
        except HttpError as error:
            # What is cached is found by its key, so only what is frozen would go on with older keys and values.
            if error.status != 400 or self._open:
                raise

    async def _reported(self) -> int | None:
        return self._version_of(
            decoded(_weights, await self._call("/model_info", method="GET")).weight_version
        )

    async def _health(self) -> Health:
        # Not /health: it generates, so that it fails in pauses and may take 20 s.
        await self._call("/model_info", method="GET")
        try:
            loads = decoded(
                _loads, await self._call("/v1/loads", method="GET", params={"include": "core"})
            ).loads
        except InferenceError:
            return Health()
        running = [load.num_running_reqs for load in loads if load.num_running_reqs is not None]
        waiting = [load.num_waiting_reqs for load in loads if load.num_waiting_reqs is not None]
        usage = [load.token_usage for load in loads if load.token_usage is not None]
        return Health(
            running=max(0, sum(running)) if running else None,
            waiting=max(0, sum(waiting)) if waiting else None,
            cache=min(1.0, max(0.0, max(usage))) if usage else None,
        )

    async def _release(self, tags: set[ReleaseTag]) -> None:
        await self._call("/release_memory_occupation", {"tags": sorted(_TAGS[t] for t in tags)})

    async def _reload(self, tags: set[ReleaseTag], rest: set[ReleaseTag]) -> None:
        await self._call("/resume_memory_occupation", {"tags": sorted(_TAGS[t] for t in tags)})
