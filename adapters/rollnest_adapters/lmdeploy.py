r"""The controller of an LMDeploy server (0.18 and later, PyTorch engine): token ids in and out over its `/generate`.

The server is to be started like this:

    lmdeploy serve api_server MODEL --backend pytorch --enable-abort-handling --logprobs-mode raw_logprobs

How rollnest's words become the server's is in `docs/topics/servers.md`.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping
from itertools import count
from random import SystemRandom
from types import MappingProxyType
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import msgspec

from rollnest.abc import Attempt, Capabilities, FinishReason, Health, PauseMode, ReleaseTag
from rollnest.errors import InferenceError, UnsupportedSampling, WeightsState, WeightUpdateFailed

from ._http import HttpError
from ._http_controller import Answer, HttpController, Open, decoded, unusable

__all__ = ["LmdeployController"]

_ABORTS_AT_ONCE = 32  # calls of one session each


class _Reason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None
    output_token_logprobs: list[tuple[float, int]] | None = None
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int] | None
    meta_info: _Meta


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: _Fault | None = None


_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)


class LmdeployController(HttpController):
    """An LMDeploy server as the policy.

    Enter it with `async with`, or give it to an `Engine`, which does. LMDeploy keeps no weight version, so the
    controller does, and a server that was restarted with other weights can't be told from one that was not. It has no
    pause either: requests wait in the controller meanwhile. Its logprobs are raw, so training needs temperature 1 and
    no filters.

    Weights are moved by the trainer (`update_weights_from_ipc` or `_from_distributed`), in the callable that is given
    to `update_weights`, or before `pause.published`; it can't load a directory.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.

    Args:
        base_url: The server's root, such as `http://127.0.0.1:23333`; without `/v1`.
        vocab_size: Ids are below it; the server doesn't say.
        max_context: Most tokens of prompt and response, its `--session-len`; the server doesn't say.
        api_key: One of the server's `--api-keys`; never shown.
        version: Weight version of the weights that the server was started with.
        stream: Has the server send tokens as they come; otherwise the whole answer at its end.
        stop_token_ids: Ids that end a turn by themselves, the model's end-of-sequence ids.
        silence: Seconds that the server may say nothing to a request, pauses not counted; `None` is no limit. Without
            `stream` a whole answer has to come within it.
        control_timeout: Seconds for each control call.
        max_connections: Most requests at once; more of them wait here. `None` leaves that to `Capacity(turns=)`.
        max_response_bytes: Most bytes of one answer.
        tls: Trusts another authority than the system's.
    """

    server = "LMDeploy"
    gated = True
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
        vocab_size: int,
        max_context: int,
        api_key: str | None = None,
        version: int = 0,
        stream: bool = False,
        stop_token_ids: Collection[int] = (),
        silence: float | None = 600.0,
        control_timeout: float = 60.0,
        max_connections: int | None = None,
        max_response_bytes: int = 256 * 1024 * 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            base_url,
            api_key=api_key,
            version=version,
            stream_every=1 if stream else None,
            stop_token_ids=stop_token_ids,
            vocab_size=vocab_size,
            max_context=max_context,
            silence=silence,
            control_timeout=control_timeout,
            update_timeout=control_timeout,
            max_connections=max_connections,
            max_response_bytes=max_response_bytes,
            tls=tls,
        )
        # Its requests are known by a number, and one that is in use is refused.
        self._numbers = count(SystemRandom().randrange(1, 2**30))

    async def _probe(self) -> Capabilities:
        try:
            await self._call("/abort_request", {"session_id": -1, "abort_all": False})
        except HttpError as error:
            if error.status == 501:
                raise InferenceError(
                    f"LMDeploy must be started with --enable-abort-handling: {error}"
                ) from error
            if error.status != 400:  # there is no such session
                raise
        try:
            await self._call(
                "/generate", {"input_ids": [0], "return_logprob": True, "max_tokens": 0}
            )
        except HttpError as error:
            if error.status != 400:
                raise
            if "logprobs_mode" in str(error):
                raise InferenceError(
                    f"LMDeploy must be started with --logprobs-mode raw_logprobs: {error}"
                ) from error
        await self._call("/wakeup")  # whoever put it to sleep before is gone
        assert self._vocab_size is not None
        assert self._max_context is not None
        return Capabilities(
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            logprobs="raw",
            stop_token_ids=self._stop_token_ids,
            sampling={"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"},
            version_spans=False,
            pause_modes={PauseMode.ABORT},
            release_tags={"kv", "weights"},
        )

    def _check_sampling(self, attempt: Attempt) -> None:
        if attempt.sampling.temperature > 2:
            raise UnsupportedSampling(
                f"LMDeploy can't honour temperature={attempt.sampling.temperature!r}; it takes 0 to 2"
            )

    def _request(self, request: Open) -> tuple[str, Any, Mapping[str, str]]:
        attempt, sampling = request.attempt, request.attempt.sampling
        session = request.number = next(self._numbers) % (2**31 - 1) + 1
        body: dict[str, Any] = {
            "session_id": session,
            "input_ids": attempt.prompt_ids.tolist(),
            "max_tokens": attempt.max_tokens,
            # What is left out is the model's own, or 0.8 and 50.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or 0.0,
            "repetition_penalty": 1.0,
            "return_logprob": True,
            # Otherwise the stop token is missing from the ids.
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if self._streams:
            body["stream"] = True
        return "/generate", body, {}

    def _answer(self, body: bytes) -> Answer:
        reply = decoded(_reply, body)
        return self._read(reply.output_ids, reply.meta_info)

    def _part(self, data: bytes) -> Answer:
        event = decoded(_event, data)
        if event.error is not None:
            code = event.error.code
            raise HttpError(
                f"LMDeploy failed the request: {self._controls.plain(event.error.message)}",
                retryable=not (isinstance(code, int) and 400 <= code < 500),
                status=code if isinstance(code, int) else 500,
            )
        if event.meta_info is None:
            raise unusable("an event with neither meta_info nor error")
        return self._read(event.output_ids, event.meta_info)

    def _read(self, output_ids: list[int] | None, meta: _Meta) -> Answer:
        finish = None if meta.finish_reason is None else meta.finish_reason.type
        if finish == "error":
            raise HttpError("LMDeploy's engine failed the request", retryable=True, status=500)
        ids = output_ids or []
        given = meta.output_token_logprobs or []
        if any(token != i for (_, token), i in zip(given, ids, strict=False)):
            raise unusable("its logprobs are of other tokens than its output_ids")
        return Answer(
            ids=ids,
            logprobs=[logprob for logprob, _ in given],
            finish=finish,
            prompt_tokens=meta.prompt_tokens,
        )

    async def _abort(self, ids: set[str]) -> None:
        if len(ids) > 1 and ids >= set(self._open):
            # This also ends what waits for a slot of its engine, which an abort by number misses.
            await self._call("/abort_request", {"abort_all": True})
            return
        limit = anyio.CapacityLimiter(_ABORTS_AT_ONCE)
        errors: list[InferenceError] = []

        async def one(session: int) -> None:
            async with limit:
                try:
                    await self._call("/abort_request", {"session_id": session, "abort_all": False})
                except HttpError as error:
                    if error.status != 400:  # it has ended, or has not arrived
                        errors.append(error)

        async with anyio.create_task_group() as tasks:
            for id_ in ids:
                request = self._open.get(id_)
                if request is not None and request.number is not None:
                    tasks.start_soon(one, request.number)
        if errors:
            raise errors[0]

    async def _pause(self, mode: PauseMode) -> None:
        await self._call("/abort_request", {"abort_all": True})

    async def _resume(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _load(self, path: str, version: int) -> None:
        raise WeightUpdateFailed(
            f"LMDeploy can't load weights from a directory ({path!r}); give a callable that moves them",
            weights=WeightsState.OLD,
        )

    async def _label(self, version: int) -> None:
        await anyio.lowlevel.checkpoint()  # it keeps none; and its cache ends with its sleep

    async def _reported(self) -> int | None:
        await anyio.lowlevel.checkpoint()
        return None

    async def _health(self) -> Health:
        await self._call("/health", method="GET")
        return Health()

    async def _release(self, tags: set[ReleaseTag]) -> None:
        if self._released:
            raise InferenceError("LMDeploy releases its memory at once, not in parts")
        await self._call("/sleep", params={"level": "1"})

    async def _reload(self, tags: set[ReleaseTag], rest: set[ReleaseTag]) -> None:
        names = {"kv": "kv_cache", "weights": "weights"}
        for tag in sorted(tags if rest else {"kv", "weights"}, reverse=True):
            await self._call("/wakeup", params={"tags": names[tag]})
