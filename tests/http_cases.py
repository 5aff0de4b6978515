"""Each HTTP controller over its fault server, for the conformance suite and for the tests of faults."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio.lowlevel

from rollnest.abc import InferenceController, WeightSource
from rollnest.testing.servers import (
    LlamacppServer,
    LmdeployServer,
    PolicyServer,
    Request,
    SglangServer,
    VllmServer,
)
from rollnest_adapters._http_controller import HttpController
from rollnest_adapters.llamacpp import LlamacppController
from rollnest_adapters.lmdeploy import LmdeployController
from rollnest_adapters.sglang import SglangController
from rollnest_adapters.vllm import VllmController

from .conformance import ControllerCase, Stall

__all__ = ["CASES", "Edit", "HttpCase", "VllmCase"]

Edit = Callable[[Any], Any]


class AllStand:
    """Everything that was sent has arrived at the server, and stands still there."""

    def __init__(self, case: HttpCase) -> None:
        self.case = case

    async def reached(self) -> None:
        while True:
            held = self.case.server.policy.decodings.values()
            sent = len(self.case.controller.open_requests)
            if sent and len(held) == sent and all(one.standing for one in held):
                return
            await anyio.lowlevel.checkpoint()


class HttpCase(ControllerCase):
    """One kind of controller over one kind of server.

    Args:
        streams: Whether answers are streamed.
    """

    server: PolicyServer
    controller: HttpController
    can_abort = True  # otherwise closing the connection is all there is
    abort_path = "/abort_request"
    one_abort_for_all = False  # whether one call takes many ids

    def __init__(self, *, streams: bool = False, **server: Any) -> None:
        self.streams = streams
        self.server = self.make_server(**server)

    @abstractmethod
    def make_server(self, **options: Any) -> PolicyServer:
        """A server by the book."""

    @abstractmethod
    def make(self, url: str, **options: Any) -> HttpController:
        """A controller for it."""

    @abstractmethod
    def lies(self) -> Mapping[str, tuple[Edit, str]]:
        """Ways of changing a final answer so that it must be refused, and what the error says."""

    @abstractmethod
    def null_reason(self, answer: Any) -> Any:
        """The answer without a reason for its end."""

    @abstractmethod
    def short_logprobs(self, answer: Any) -> Any:
        """The answer without its last logprob."""

    @abstractmethod
    def name_of(self, request: Request) -> str:
        """What the server's abort calls a request for tokens."""

    def requests(self) -> list[Request]:
        """Requests for tokens, in order."""
        return [
            request
            for request in self.server.http.requests
            if request.path == self.server.generates and self.is_generation(request)
        ]

    def is_generation(self, request: Request) -> bool:
        """Whether it is no probe."""
        return True

    def open(self) -> AbstractAsyncContextManager[InferenceController]:
        return self.opened()

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncGenerator[HttpController]:
        """Serves, and enters a controller; what it left behind is checked."""
        self.server.policy.restart()
        async with self.server.serve():
            async with self.make(self.server.url, **options) as controller:
                self.controller = controller
                yield controller
            assert self.server.policy.paused is None

    def prompt(self, number: int) -> list[int]:
        return [1 + number, 7, 5]

    @asynccontextmanager
    async def stall(self, *, after: int) -> AsyncGenerator[Stall]:
        with self.server.stalled(after=after):
            yield AllStand(self)

    def passes(self) -> int:
        return self.server.policy.passes

    def new_weights(self) -> WeightSource:
        return "/models/other"

    async def open_requests(self, controller: InferenceController) -> Collection[str]:
        assert isinstance(controller, HttpController)
        await self.let_run()
        return {*controller.open_requests, *self.server.policy.decodings}

    def late_tokens(self, controller: InferenceController) -> int:
        assert isinstance(controller, HttpController)
        return controller.tokens_late + self.server.policy.wasted

    async def let_run(self) -> None:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()


def _step(key: str) -> Any:
    return int(key) if key.lstrip("-").isdigit() else key


def found(answer: Any, path: str) -> Any:
    """What stands at a place such as `choices.0.token_ids`."""
    for key in path.split("."):
        answer = answer[_step(key)]
    return answer


def changed(answer: Any, path: str, value: Any) -> Any:
    """The answer with one field changed; `value` may be a function of what stands there."""
    way, _, last = path.rpartition(".")
    at = found(answer, way) if way else answer
    key = _step(last)
    at[key] = value(at[key]) if callable(value) else value
    return answer


def twice(value: Any) -> Any:
    return value * 2


def without_last(value: Any) -> Any:
    return value[:-1]


def edit(path: str, value: Any) -> Edit:
    """A function that changes one field."""
    return lambda answer: changed(answer, path, value)


def final(change: Edit, path: str) -> Edit:
    """Changes only what has a reason for its end."""

    def maybe(answer: Any) -> Any:
        return answer if found(answer, path) is None else change(answer)

    return maybe


class VllmCase(HttpCase):
    abort_path = "/abort_requests"
    one_abort_for_all = True

    @property
    def asleep(self) -> set[str]:
        assert isinstance(self.server, VllmServer)
        return self.server.asleep

    def name_of(self, request: Request) -> str:
        return f"generate-tokens-{request.headers['x-request-id']}"

    def is_generation(self, request: Request) -> bool:
        return "logit_bias" not in request.json()["sampling_params"]

    def make_server(self, **options: Any) -> PolicyServer:
        return VllmServer(**options)

    def make(self, url: str, **options: Any) -> VllmController:
        if self.streams:
            options.setdefault("stream_every", 4)
        return VllmController(url, **options)

    def lies(self) -> Mapping[str, tuple[Edit, str]]:
        ids, content = "choices.0.token_ids", "choices.0.logprobs.content"
        some: dict[str, tuple[Edit, str]] = {
            "no JSON": (lambda _: b"<html>busy</html>", "JSON is malformed"),
            "a list": (lambda _: [1], "Expected `object`, got `array`"),
            "two choices": (edit("choices", twice), "2 choices, 1 was asked for"),
            "tokens null": (edit(ids, None), r"got `null` - at `\$\.choices\[0\]\.token_ids`"),
            "a token that is text": (edit(f"{ids}.0", "x"), "Expected `int`, got `str`"),
            "a token out of range": (self._all_tokens(1000), "outside the vocabulary of 1000"),
            "a negative token": (self._all_tokens(-1), "-1"),
            "logprobs null": (edit("choices.0.logprobs", None), r"got `null` - at .*logprobs"),
            "a logprob that is null": (edit(f"{content}.0.logprob", None), "got `null`"),
            "a logprob that is NaN": (edit(f"{content}.0.logprob", float("nan")), "malformed"),
            "a logprob above 0": (edit(f"{content}.0.logprob", 0.5), "0.5"),
            "fewer logprobs": (self.short_logprobs, "tokens have"),
            "other tokens' logprobs": (edit(f"{content}.0.token_id", 1), "of other tokens"),
            "an unknown reason": (edit("choices.0.finish_reason", "tired"), "reason 'tired'"),
            "a gap in the versions": (
                edit("choices.0.weight_versions", [{"version": "default", "start": 1, "end": 9}]),
                "gap before token 1",
            ),
            "too few versions": (
                edit("choices.0.weight_versions", [{"version": "default", "start": 0, "end": 1}]),
                "have 1 versions",
            ),
            "a version that is no number": (
                edit("choices.0.weight_versions.0.version", "step-3"),
                "calls its weights 'step-3'",
            ),
        }
        if not self.streams:
            some["another prompt"] = (
                edit("usage.prompt_tokens", 99),
                "a prompt of 99 tokens, 3 were sent",
            )
        return {
            name: (final(change, "choices.0.finish_reason"), says)
            for name, (change, says) in some.items()
        }

    def _all_tokens(self, token: int) -> Edit:
        def change(answer: Any) -> Any:
            choice = answer["choices"][0]
            choice["token_ids"] = [token for _ in choice["token_ids"]]
            for given in choice["logprobs"]["content"]:
                given["token_id"] = token
            return answer

        return change

    def null_reason(self, answer: Any) -> Any:
        return changed(answer, "choices.0.finish_reason", None)

    def short_logprobs(self, answer: Any) -> Any:
        return changed(answer, "choices.0.logprobs.content", without_last)


class SglangCase(HttpCase):
    """SGLang; streams are incremental unless said otherwise."""

    def make_server(self, **options: Any) -> PolicyServer:
        return SglangServer(**options)

    def make(self, url: str, **options: Any) -> SglangController:
        if self.streams:
            options.setdefault("stream_every", 4)
        return SglangController(url, **options)

    def name_of(self, request: Request) -> str:
        name: str = request.json()["rid"]
        return name

    def is_generation(self, request: Request) -> bool:
        return "token_ids_logprob" not in request.json()

    def lies(self) -> Mapping[str, tuple[Edit, str]]:
        given = "meta_info.output_token_logprobs"
        some: dict[str, tuple[Edit, str]] = {
            "no JSON": (lambda _: b"<html>busy</html>", "JSON is malformed"),
            "a list": (lambda _: [1], "Expected `object`, got `array`"),
            "logprobs null": (edit(given, None), "output_token_logprobs is null"),
            "a logprob that is null": (edit(f"{given}.0.0", None), "got `null`"),
            "a logprob that is NaN": (edit(f"{given}.0.0", float("nan")), "malformed"),
            "a logprob above 0": (edit(f"{given}.-1.0", 0.5), "0.5"),
            "a token that is text": (edit(f"{given}.0.1", "x"), "Expected `int`, got `str`"),
            "a token out of range": (edit(f"{given}.-1.1", 1000), "outside the vocabulary of 1000"),
            "a negative token": (edit(f"{given}.-1.1", -1), "-1"),
            "an unknown reason": (edit("meta_info.finish_reason.type", "tired"), "reason 'tired'"),
            "another prompt": (edit("meta_info.prompt_tokens", 99), "a prompt of 99 tokens"),
            "a gap in the versions": (
                edit("meta_info.weight_versions", [{"version": "default", "start": 1, "end": 9}]),
                "gap before token 1",
            ),
            "a version that is no number": (
                edit("meta_info.weight_versions.0.version", "step-3"),
                "calls its weights 'step-3'",
            ),
        }
        if not (self.streams and self.cumulative):
            some["fewer logprobs"] = (self.short_logprobs, "it made 6 tokens and sent 5")
        return {
            name: (final(change, "meta_info.finish_reason"), says)
            for name, (change, says) in some.items()
        }

    cumulative = False

    def null_reason(self, answer: Any) -> Any:
        return changed(answer, "meta_info.finish_reason", None)

    def short_logprobs(self, answer: Any) -> Any:
        return changed(answer, "meta_info.output_token_logprobs", without_last)


class SglangCumulativeCase(SglangCase):
    """SGLang as it streams by itself: each part holds everything before it."""

    cumulative = True

    def make_server(self, **options: Any) -> PolicyServer:
        return SglangServer(incremental=False, **options)


class LmdeployCase(HttpCase):
    """LMDeploy."""

    def make_server(self, **options: Any) -> PolicyServer:
        return LmdeployServer(**options)

    def make(self, url: str, **options: Any) -> LmdeployController:
        options.pop("stream_every", None)
        options.setdefault("vocab_size", self.server.policy.vocab_size)
        options.setdefault("max_context", self.server.policy.max_context)
        return LmdeployController(url, stream=self.streams, **options)

    def new_weights(self) -> WeightSource:
        return self.moved

    async def moved(self) -> None:
        """The trainer's own transfer."""
        self.server.policy.load("/models/other")
        await anyio.lowlevel.checkpoint()

    def name_of(self, request: Request) -> str:
        return str(request.json()["session_id"])

    def is_generation(self, request: Request) -> bool:
        return "session_id" in request.json()

    def lies(self) -> Mapping[str, tuple[Edit, str]]:
        given = "meta_info.output_token_logprobs"
        some: dict[str, tuple[Edit, str]] = {
            "no JSON": (lambda _: b"<html>busy</html>", "JSON is malformed"),
            "a list": (lambda _: [1], "Expected `object`, got `array`"),
            "logprobs null": (edit(given, None), "have 0 logprobs"),
            "a logprob that is null": (edit(f"{given}.0.0", None), "got `null`"),
            "a logprob above 0": (edit(f"{given}.0.0", 0.5), "0.5"),
            "a token that is text": (edit("output_ids.0", "x"), "Expected `int`, got `str`"),
            "other tokens' logprobs": (edit(f"{given}.0.1", 1), "of other tokens"),
            "fewer logprobs": (self.short_logprobs, "tokens have"),
            "an unknown reason": (edit("meta_info.finish_reason.type", "tired"), "reason 'tired'"),
            "another prompt": (edit("meta_info.prompt_tokens", 99), "a prompt of 99 tokens"),
        }
        return {
            name: (final(change, "meta_info.finish_reason"), says)
            for name, (change, says) in some.items()
        }

    def null_reason(self, answer: Any) -> Any:
        return changed(answer, "meta_info.finish_reason", None)

    def short_logprobs(self, answer: Any) -> Any:
        return changed(answer, "meta_info.output_token_logprobs", without_last)


class LlamacppCase(HttpCase):
    """llama.cpp, which can only stream."""

    can_abort = False

    def __init__(self, **server: Any) -> None:
        super().__init__(streams=True, **server)

    def make_server(self, **options: Any) -> PolicyServer:
        return LlamacppServer(**options)

    def make(self, url: str, **options: Any) -> LlamacppController:
        options.pop("stream_every", None)
        return LlamacppController(url, **options)

    def new_weights(self) -> WeightSource:
        return self.restarted

    async def restarted(self) -> None:
        """The server with other weights."""
        self.server.policy.forget(running=True)
        self.server.policy.load("/models/other")
        await anyio.lowlevel.checkpoint()

    def late_tokens(self, controller: InferenceController) -> int:
        unheard = [len(one.ids) for one in self.server.policy.decodings.values()]
        return super().late_tokens(controller) + sum(unheard)

    def name_of(self, request: Request) -> str:
        raise AssertionError

    def lies(self) -> Mapping[str, tuple[Edit, str]]:
        given = "completion_probabilities"
        some: dict[str, tuple[Edit, str]] = {
            "no JSON": (lambda _: b"<html>busy</html>", "JSON is malformed"),
            "a list": (lambda _: [1], "Expected `object`, got `array`"),
            "tokens null": (edit("tokens", None), r"got `null` - at `\$\.tokens`"),
            "a logprob that is null": (edit(f"{given}.0.logprob", None), "got `null`"),
            "a logprob above 0": (edit(f"{given}.0.logprob", 0.5), "0.5"),
            "other tokens' logprobs": (edit(f"{given}.0.id", 1), "of other tokens"),
            "fewer logprobs": (self.short_logprobs, "of other tokens"),
            "an unknown reason": (edit("stop_type", "tired"), "reason 'tired'"),
        }
        return {name: (at_the_end(change), says) for name, (change, says) in some.items()}

    def null_reason(self, answer: Any) -> Any:
        return changed(answer, "stop", False)

    def short_logprobs(self, answer: Any) -> Any:
        return changed(answer, "completion_probabilities", without_last)


def at_the_end(change: Edit) -> Edit:
    """Changes only the last part."""

    def maybe(answer: Any) -> Any:
        return change(answer) if answer["stop"] else answer

    return maybe


CASES: dict[str, Callable[[], HttpCase]] = {
    "vllm": VllmCase,
    "vllm-stream": lambda: VllmCase(streams=True),
    "sglang": SglangCase,
    "sglang-stream": lambda: SglangCase(streams=True),
    "sglang-cumulative": lambda: SglangCumulativeCase(streams=True),
    "lmdeploy": LmdeployCase,
    "lmdeploy-stream": lambda: LmdeployCase(streams=True),
    "llamacpp": LlamacppCase,
}
"""Makes a case of each kind."""
