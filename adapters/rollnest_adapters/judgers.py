"""Judgers that ask somebody else: an HTTP service, or a language model.

Invariants:

- No verdict is no score: whatever goes wrong raises, and the engine fails the sample with it.
- What is asked again had no effect that counts: judging changes nothing. What is wrong for good is asked once.
- The policy that is trained is asked through its gate, never past it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from rollnest import Sample, Sampling
from rollnest.abc import InferenceController, Tokenizer, VerdictLike
from rollnest.errors import JudgeError

from ._checks import check_text
from ._http import check_base_url
from ._http_service import HttpService
from ._judge_models import ChatServer, JudgeModel, OwnController, TrainedPolicy
from ._judge_models import JudgePrompt as JudgePrompt
from ._limiter import CallOptions, Limiter

__all__ = ["HttpJudger", "JudgePrompt", "LLMJudger", "sample_payload"]


def sample_payload(sample: Sample) -> dict[str, Any]:
    """Returns what `HttpJudger` posts about a sample, unless told otherwise.

    Its keys: `uid`; `data_source`, `label`, `meta` and `messages` of the prompt; `response`, the text of all turns of
    the policy, without what tools and the loop put in between (`None` without a tokenizer); `response_ids`, the ids
    that the policy sampled; `turns`, each with `text` and `finish_reason`; `finish_reason` of the sample.
    """
    prompt, turns = sample.prompt, sample.turns
    texts = [turn.text for turn in turns]
    return {
        "uid": sample.uid,
        "data_source": prompt.data_source,
        "label": prompt.label,
        "meta": dict(prompt.meta),
        "messages": prompt.messages,
        "response": None if None in texts else "".join(cast("list[str]", texts)),
        "response_ids": [token for turn in turns for token in turn.ids],
        "turns": [{"text": turn.text, "finish_reason": turn.finish_reason} for turn in turns],
        "finish_reason": sample.finish_reason,
    }


def _as_it_is(answer: Any) -> VerdictLike:
    return cast("VerdictLike", answer)  # the engine checks it


class HttpJudger:
    """Posts each sample to an HTTP service, which answers with its verdict.

        TaskSpec("maths", prompts, judger=HttpJudger("http://127.0.0.1:8000/judge"))

    The answer is JSON: a number, or an object with `score` (the rest becomes the verdict's details), unless `parse`
    makes something else of it. An answer that is no verdict, a refusal, and a service that does not work fail the
    sample. Nobody opens or closes the judger: connections are there while it is asked, and shared. `request` and
    `parse` run on the event loop, so keep them short.

    Args:
        url: Where samples are posted to.
        request: Makes what is posted of a sample; anything that JSON can hold.
        parse: Makes the verdict of what was answered; for a group, of each of the answers.
        judges_groups: Posts the members of a group together, as a list, and gets a list with an answer for each.
        api_key: Sent as a bearer token; never shown.
        timeout: Seconds that the service may say nothing to a request.
        concurrency: Most requests at once. `Capacity(judges=)` bounds them too.
        rate: Most requests a second; `None` is no limit. Waiting counts towards `Limits(judge=)`, so that should be
            well over `Capacity(judges=)` / `rate`.
        tries: How often a request is sent, if it fails for a reason that may pass: no connection, 408, 429, 5xx.
        max_wait: Most seconds between two tries. If the service asks for more (`Retry-After`) the sample fails.
        tls: Trusts another authority than the system's.
    """

    def __init__(
        self,
        url: str,
        *,
        request: Callable[[Sample], Any] = sample_payload,
        parse: Callable[[Any], VerdictLike] = _as_it_is,
        judges_groups: bool = False,
        api_key: str | None = None,
        timeout: float = 30.0,
        concurrency: int = 32,
        rate: float | None = None,
        tries: int = 3,
        max_wait: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        for name, function in (("request", request), ("parse", parse)):
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}")
        if not isinstance(judges_groups, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"judges_groups must be True or False, got {judges_groups!r}")
        self._service = HttpService(
            url,
            api_key=api_key,
            timeout=timeout,
            tls=tls,
            options=CallOptions(concurrency=concurrency, rate=rate, tries=tries, max_wait=max_wait),
        )
        self._request = request
        self._parse = parse
        self.judges_groups = judges_groups

    def __repr__(self) -> str:
        return f"HttpJudger({self._service.url!r})"

    async def judge(self, sample: Sample) -> VerdictLike:
        """Asks about one sample.

        Raises:
            JudgeError: What is posted is no JSON.
            InferenceError: The service gave no answer that can be used.

        Cancellation: the request is dropped.
        """
        return self._parse(await self._call(self._request(sample)))

    async def batch_judge(self, samples: Sequence[Sample]) -> list[VerdictLike]:
        """Asks about a group; see `judge`."""
        answers: list[Any] = await self._call([self._request(sample) for sample in samples])
        if type(answers) is not list:
            raise JudgeError(f"{self!r}: a group's answer must be a list, got {answers!r:.200}")
        return [self._parse(answer) for answer in answers]

    async def _call(self, body: Any) -> Any:
        try:
            return await self._service.call(body)
        except (TypeError, msgspec.MsgspecError, OverflowError) as error:
            raise JudgeError(f"{self!r}: what is posted must be JSON: {error}") from error


class LLMJudger:
    """Has a language model judge: makes a question of the sample, and the verdict of the answer's text.

        LLMJudger("http://127.0.0.1:8000", model="judge-7b", prompt=ask, parse=read)
        LLMJudger(controller, prompt=ask, parse=read)

    The first asks a server with OpenAI's chat route. The second asks the policy that is trained: the controller is the
    engine's own. Its requests pass the gate (`current_policy`): they rest in pauses, and are sent again as turns are.
    With `uses_policy=False` the controller is one of your own, which you enter. `prompt` and `parse` run on the event
    loop, so keep them short.

    Args:
        model_at: The controller, or the server's root URL, with or without `/v1`.
        prompt: Makes the question of a sample. Ids are for controllers only.
        parse: Makes the verdict of the answer's text. Raise where it has none: the sample fails, it gets no score.
        sampling: How the model answers.
        uses_policy: Whether it is the policy that is trained. `None`: a controller is, a server is not.
        tokenizer: Renders questions and decodes answers. For a controller of your own; the policy has the engine's.
        model: The model's name. For a server.
        api_key: Sent as a bearer token; never shown. For a server.
        timeout: Seconds that a server may say nothing to a request; `None` is 120.
        concurrency: Most requests at once; `None` is 32. Not for the policy: `Capacity` bounds those.
        rate: Most requests a second; see `HttpJudger`. Not for the policy.
        tries: How often a request is sent, if it fails for a reason that may pass; `None` is 3. Not for the policy.
        max_wait: Most seconds between two tries; `None` is 30. Not for the policy.
        tls: Trusts another authority than the system's. For a server.
    """

    def __init__(
        self,
        model_at: InferenceController | str,
        *,
        prompt: Callable[[Sample], JudgePrompt],
        parse: Callable[[str], VerdictLike],
        sampling: Sampling = Sampling(512, temperature=0.0),  # noqa: B008  (frozen)
        uses_policy: bool | None = None,
        tokenizer: Tokenizer | None = None,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
        rate: float | None = None,
        tries: int | None = None,
        max_wait: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        for name, function in (("prompt", prompt), ("parse", parse)):
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}")
        if not isinstance(sampling, Sampling):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"sampling must be a Sampling, got {sampling!r}")
        if not isinstance(uses_policy, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"uses_policy must be True, False or None, got {uses_policy!r}")
        self._prompt = prompt
        self._parse = parse
        of_calls = {
            "concurrency": concurrency,
            "rate": rate,
            "tries": tries,
            "max_wait": max_wait,
        }
        of_servers = {"model": model, "api_key": api_key, "timeout": timeout, "tls": tls}
        is_server = isinstance(model_at, str)
        self.uses_policy: bool = not is_server if uses_policy is None else uses_policy
        if is_server and self.uses_policy:
            raise ValueError(
                f"uses_policy is for the engine's controller; {model_at!r} would be asked past its gate"
            )
        if not is_server:
            _only_for("a server", of_servers)
        if self.uses_policy or is_server:
            _only_for("a controller of your own", {"tokenizer": tokenizer})
        if self.uses_policy:
            _only_for("a server or a controller of your own", of_calls)
        elif sampling.seed == "derived":
            raise ValueError(
                "sampling.seed 'derived' is for the policy, which has an engine's seed"
            )
        options = CallOptions(
            concurrency=32 if concurrency is None else concurrency,
            rate=rate,
            tries=3 if tries is None else tries,
            max_wait=30.0 if max_wait is None else max_wait,
        )
        self._model: JudgeModel
        if isinstance(model_at, str):
            url = check_base_url(model_at, name="model_at")
            check_text("model", model)
            service = HttpService(
                f"{url.removesuffix('/v1')}/v1/chat/completions",
                api_key=api_key,
                timeout=120.0 if timeout is None else timeout,
                options=options,
                tls=tls,
            )
            self._model = ChatServer(service, str(model), sampling)
        elif self.uses_policy:
            self._model = TrainedPolicy(model_at, sampling)
        elif tokenizer is None:
            raise ValueError("tokenizer is needed for a controller of your own, got None")
        else:
            self._model = OwnController(model_at, tokenizer, sampling, Limiter(options))

    def __repr__(self) -> str:
        return f"LLMJudger({self._model!r})"

    async def judge(self, sample: Sample) -> VerdictLike:
        """Asks about one sample.

        Raises:
            JudgeError: There is no answer with text.
            InferenceError: The model's server failed.

        Cancellation: the request is cancelled.
        """
        question = self._prompt(sample)
        if not question:
            raise JudgeError(f"prompt made no question of {sample.uid!r}: {question!r}")
        return self._parse(await self._model.answer(question))


def _only_for(whom: str, options: dict[str, Any]) -> None:
    """Raises if an option is given that means nothing here."""
    for name, value in options.items():
        if value is not None:
            shown = "***" if name == "api_key" else repr(value)
            raise ValueError(f"{name} is for {whom} only, got {shown}")
