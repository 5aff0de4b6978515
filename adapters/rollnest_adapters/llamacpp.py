"""The controller of a llama.cpp server: token ids in and out over its `/completion`.

    llama-server --model MODEL.gguf --ctx-size 65536 --parallel 32 --slots

How rollnest's words become the server's is in `docs/topics/servers.md`.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import msgspec
from attrs import evolve

from rollnest.abc import Attempt, Capabilities, FinishReason, Health, PauseMode, ReleaseTag
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed

from ._http import HttpError
from ._http_controller import Answer, HttpController, Open, decoded, unusable

__all__ = ["LlamacppController"]


class _Probability(msgspec.Struct):
    id: int
    logprob: float


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    tokens: list[int] = []
    completion_probabilities: list[_Probability] = []
    stop: bool = False
    stop_type: str = "none"
    error: _Fault | None = None


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Settings


class _Meta(msgspec.Struct):
    n_vocab: int


class _Model(msgspec.Struct):
    meta: _Meta


class _Models(msgspec.Struct):
    data: list[_Model]


class _Slot(msgspec.Struct):
    is_processing: bool


_event = msgspec.json.Decoder(_Event)
_props = msgspec.json.Decoder(_Props)
_models = msgspec.json.Decoder(_Models)
_slots = msgspec.json.Decoder(list[_Slot])


class LlamacppController(HttpController):
    """A llama.cpp server as the policy, for evaluation and for trying things out on a CPU.

    Enter it with `async with`, or give it to an `Engine`, which does. Answers are always streamed: the server knows no
    aborts, so a connection is closed, and what came is kept. It has no pause, so requests wait in the controller
    meanwhile; it keeps no weight version, so the controller does. Stop ids are looked for here. Its logprobs are raw,
    so training needs temperature 1 and no filters.

    It can't load weights while it runs: give `update_weights` a callable that restarts it.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.

    Args:
        base_url: The server's root, such as `http://127.0.0.1:8080`; without `/v1`.
        api_key: The server's `--api-key`; never shown.
        version: Weight version of the weights that the server was started with.
        stop_token_ids: Ids that end a turn by themselves, the model's end-of-sequence ids.
        vocab_size: Ids are below it; `None` asks the server.
        max_context: Most tokens of prompt and response; `None` asks the server for that of one slot.
        silence: Seconds that the server may say nothing to a request, pauses not counted; `None` is no limit.
        control_timeout: Seconds for each control call.
        max_connections: Most requests at once; more of them wait here. As many as the server has slots is best: what
            it has no slot for waits there in silence.
        max_response_bytes: Most bytes of one answer.
        tls: Trusts another authority than the system's.
    """

    server = "llama.cpp"
    gated = True
    closes = True
    finish_reasons: ClassVar[Mapping[str, FinishReason]] = MappingProxyType(
        {
            "eos": FinishReason.STOP,
            "word": FinishReason.STOP,
            "stop": FinishReason.STOP,
            "limit": FinishReason.LENGTH,
            "abort": FinishReason.ABORT,
        }
    )

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        stop_token_ids: Collection[int] = (),
        vocab_size: int | None = None,
        max_context: int | None = None,
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
            stream_every=1,
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

    async def _probe(self) -> Capabilities:
        props = decoded(_props, await self._call("/props", method="GET"))
        try:
            await self._busy()
        except HttpError as error:
            if error.status in (403, 404, 501):
                raise InferenceError(f"llama.cpp must be started with --slots: {error}") from error
            raise
        vocab_size = self._vocab_size
        if vocab_size is None:
            models = decoded(_models, await self._call("/v1/models", method="GET")).data
            if not models:
                raise InferenceError("llama.cpp serves no model")
            vocab_size = models[0].meta.n_vocab
        return Capabilities(
            vocab_size=vocab_size,
            max_context=self._context(props.default_generation_settings.n_ctx, "--ctx-size"),
            logprobs="raw",
            stop_token_ids=self._stop_token_ids,
            sampling={"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed"},
            version_spans=False,
            pause_modes={PauseMode.ABORT},
        )

    def _check_sampling(self, attempt: Attempt) -> None:
        pass  # it takes what `Sampling` takes

    def _request(self, request: Open) -> tuple[str, Any, Mapping[str, str]]:
        attempt, sampling = request.attempt, request.attempt.sampling
        body: dict[str, Any] = {
            "prompt": attempt.prompt_ids.tolist(),
            "n_predict": attempt.max_tokens,
            "temperature": sampling.temperature,
            # What is left out is on.
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            "repeat_penalty": 1.0,
            "samplers": ["top_k", "top_p", "min_p", "temperature"],
            "n_probs": 1,
            "return_tokens": True,
            "stream": True,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if isinstance(sampling.seed, int):
            body["seed"] = sampling.seed % (2**32 - 1)
        return "/completion", body, {}

    def _answer(self, body: bytes) -> Answer:
        return self._part(body)

    def _part(self, data: bytes) -> Answer:
        event = decoded(_event, data)
        if event.error is not None:
            code = event.error.code
            raise HttpError(
                f"llama.cpp failed the request: {self._controls.plain(event.error.message)}",
                retryable=not (isinstance(code, int) and 400 <= code < 500),
                status=code if isinstance(code, int) else 500,
            )
        given = event.completion_probabilities
        if [one.id for one in given] != event.tokens:
            raise unusable("its probabilities are of other tokens than its tokens")
        return Answer(
            ids=event.tokens,
            logprobs=[one.logprob for one in given],
            finish=event.stop_type if event.stop else None,
        )

    def _take(self, request: Open, answer: Answer) -> None:
        stops = request.attempt.sampling.stop_token_ids
        for number, token in enumerate(answer.ids, 1):
            if token in stops:
                answer = evolve(
                    answer,
                    ids=answer.ids[:number],
                    logprobs=answer.logprobs[:number],
                    finish="stop",
                )
                break
        super()._take(request, answer)

    async def _abort(self, ids: set[str]) -> None:
        await anyio.lowlevel.checkpoint()  # the connection is closed, and that is all there is

    async def _pause(self, mode: PauseMode) -> None:
        await self.abort(None)
        # There is nothing to wait for but its answers, one after the other: it may notice a closed connection late.
        with anyio.fail_after(self._control_timeout):
            while await self._busy():
                pass

    async def _busy(self) -> int:
        """How many requests it works on."""
        slots = decoded(_slots, await self._call("/slots", method="GET"))
        return sum(slot.is_processing for slot in slots)

    async def _resume(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _load(self, path: str, version: int) -> None:
        raise WeightUpdateFailed(
            f"llama.cpp can't load weights while it runs ({path!r}); give a callable that restarts it",
            weights=WeightsState.OLD,
        )

    async def _label(self, version: int) -> None:
        await anyio.lowlevel.checkpoint()  # it keeps none

    async def _reported(self) -> int | None:
        await anyio.lowlevel.checkpoint()
        return None

    async def _health(self) -> Health:
        await self._call("/health", method="GET")
        return Health(running=await self._busy())

    async def _release(self, tags: set[ReleaseTag]) -> None:
        raise AssertionError("nothing can be released")

    async def _reload(self, tags: set[ReleaseTag], rest: set[ReleaseTag]) -> None:
        raise AssertionError("nothing was released")
