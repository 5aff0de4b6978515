"""Language models that judge: behind a server's URL, behind a controller of one's own, or the policy itself.

Each answers a question with text, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from rollnest import Attempt, FinishReason, Message, Sampling, current_policy
from rollnest.abc import InferenceController, Tokenizer
from rollnest.errors import InferenceError, JudgeError

from ._http_service import HttpService
from ._limiter import Limiter

__all__ = ["ChatServer", "JudgeModel", "JudgePrompt", "OwnController", "TrainedPolicy"]

JudgePrompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""What a judge model is asked: the text of one message of the user, chat messages, or token ids."""


class JudgeModel(Protocol):
    """Answers a question."""

    async def answer(self, question: JudgePrompt) -> str:
        """Returns the answer's text."""
        ...


class ChatServer:
    """A server with the chat route that OpenAI has made common."""

    def __init__(self, service: HttpService, model: str, sampling: Sampling) -> None:
        self._service = service
        self._model = model
        self._sampling = _body(sampling)

    def __repr__(self) -> str:
        return f"{self._model!r} at {self._service.url}"

    async def answer(self, question: JudgePrompt) -> str:
        """See `JudgeModel`."""
        messages = _messages(question)
        if messages is None:
            raise JudgeError(f"a server is asked with text or messages, got ids: {question!r:.100}")
        body = {"model": self._model, "messages": messages, **self._sampling}
        reply = await self._service.call(body)
        try:
            (choice, *_) = reply["choices"]
            text = choice["message"]["content"]
        except (KeyError, TypeError, ValueError):
            raise JudgeError(f"{self!r} answered without a message: {reply!r:.200}") from None
        if not isinstance(text, str):
            why = choice.get("finish_reason")
            raise JudgeError(f"{self!r} answered without text (finish_reason {why!r})")
        return text


class OwnController:
    """A controller that the user has entered, and that is not the policy's."""

    def __init__(
        self,
        controller: InferenceController,
        tokenizer: Tokenizer,
        sampling: Sampling,
        limiter: Limiter,
    ) -> None:
        self._controller = controller
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limiter = limiter

    def __repr__(self) -> str:
        return repr(self._controller)

    async def answer(self, question: JudgePrompt) -> str:
        """See `JudgeModel`."""
        messages = _messages(question)
        ids = self._tokenizer.render(messages) if messages is not None else question
        attempt = await self._limiter.run(partial(self._generate, cast("Sequence[int]", ids)))
        return self._tokenizer.decode(attempt.received.ids.tolist())

    async def _generate(self, ids: Sequence[int]) -> Attempt:
        known = self._controller.capabilities
        room = known.max_context - len(ids)
        if room < 1:
            raise JudgeError(
                f"a question of {len(ids)} tokens leaves no room in a context of {known.max_context}"
            )
        attempt = Attempt(
            ids,
            max_tokens=min(self._sampling.max_tokens, room),
            sampling=self._sampling,
            vocab_size=known.vocab_size,
        )
        try:
            await self._controller.generate(attempt)
        finally:
            attempt.close()
        if attempt.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise InferenceError("the judge's answer was aborted", retryable=True)
        return attempt


class TrainedPolicy:
    """The policy that is trained, asked through its gate."""

    def __init__(self, controller: InferenceController, sampling: Sampling) -> None:
        self._controller = controller
        self._sampling = sampling

    def __repr__(self) -> str:
        return f"the policy at {self._controller!r}"

    async def answer(self, question: JudgePrompt) -> str:
        """See `JudgeModel`."""
        policy = current_policy()
        if policy.controller is not self._controller:
            raise JudgeError(
                f"{self._controller!r} is not the engine's controller; say uses_policy=False for one of your own"
            )
        turn = await policy.generate(question, sampling=self._sampling)
        if turn.text is None:
            raise JudgeError("the engine has no tokenizer, so the policy's answer has no text")
        return turn.text


def _messages(question: JudgePrompt) -> Sequence[Message] | None:
    """The question as chat messages; `None` if it is ids."""
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    if question and isinstance(question[0], int):
        return None
    return cast("Sequence[Message]", question)


def _body(sampling: Sampling) -> dict[str, Any]:
    """Sampling in the server's words; what most servers know besides OpenAI's is sent if it is set."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.min_tokens:
        body["min_tokens"] = sampling.min_tokens
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    further = {"top_k": sampling.top_k, "min_p": sampling.min_p, "seed": sampling.seed}
    return body | {name: value for name, value in further.items() if value is not None}
