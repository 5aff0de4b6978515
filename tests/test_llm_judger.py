"""Judgers that ask a language model: a server, the policy that is trained, or a controller of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anyio import create_task_group, fail_after, sleep

from rollnest import (
    AsyncStrategy,
    Attempt,
    Capacity,
    Engine,
    Limits,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest.errors import InferenceError
from rollnest.testing import RecordingInstrument, Reply, ScriptedController, assert_conserved
from rollnest.testing.servers import Exchange, LoopbackServer
from rollnest_adapters.judgers import HttpJudger, LLMJudger
from rollnest_adapters.pool import ControllerPool

from .hand_clock import hand_backends
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio

by_hand = pytest.mark.parametrize("anyio_backend", [make() for make in hand_backends()])

TOKENIZER = ToyTokenizer({10: "a", 11: "b", 20: "good", 21: "bad"})
QUESTION = TOKENIZER.render([{"role": "user", "content": "ab?"}])


def ask(sample: Sample) -> str:
    return f"{sample.turns[-1].text}?"


def read(text: str) -> float:
    return {"good": 1.0, "bad": 0.0}[text]


def script(attempt: Attempt) -> Reply:
    """A policy that answers everything with "ab", and finds that good."""
    ids, start = attempt.prompt_ids.tolist(), len(QUESTION)
    if ids[:start] == QUESTION:
        return Reply([20, EOS][len(ids) - start :], delay=1.0)  # what a pause has left to say
    return Reply([10, 11, EOS], delay=0.5)


def task(judger: Any, **options: Any) -> TaskSpec:
    defaults: dict[str, Any] = {
        "name": "task",
        "prompts": [Prompt(f"p{i}", token_ids=[1 + i]) for i in range(8)],
        "judger": judger,
        "group_size": 2,
        "epochs": 1,
    }
    return TaskSpec(**(defaults | options))


async def judged(judger: Any, controller: Any = None, **options: Any) -> Sample:
    """The one sample of an engine with one prompt."""
    heard = RecordingInstrument()
    spec = task(judger, prompts=[Prompt("p", token_ids=[1])], group_size=1)
    defaults: dict[str, Any] = {"tokenizer": TOKENIZER, "instruments": [heard]}
    policy = controller or ScriptedController(lambda _: Reply([10, 11, EOS]))
    engine = Engine(policy, spec, **(defaults | options))
    async with engine:
        async for _ in engine.batches(1):
            pass
    (sample,) = heard.samples
    return sample


def failure(sample: Sample) -> str:
    assert sample.status is Status.FAILED
    assert sample.reward is None
    assert sample.failure is not None
    assert sample.failure.kind == "judge"
    return sample.failure.message


# The policy that is trained


async def judge_in_the_loop(rollout: Rollout) -> None:
    await rollout.generate()
    await rollout.judge()


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
async def test_the_policy_judges_itself_with_one_place_of_everything(
    in_loop: bool, pooled: bool
) -> None:
    one = ScriptedController(script)
    controller = ControllerPool({"a": one}, concurrency=1) if pooled else one
    judger = LLMJudger(controller, prompt=ask, parse=read)
    options: dict[str, Any] = {"loop": judge_in_the_loop} if in_loop else {}
    engine = Engine(
        controller,
        task(judger, **options),
        tokenizer=TOKENIZER,
        capacity=Capacity(turns=1, groups=1, judges=1, tools=1),
    )
    async with engine:
        with fail_after(600):
            batch = await engine.next_batch(8)
    assert [sample.reward for sample in batch.samples] == [1.0] * 16
    assert engine.statistics().judge_tokens == 32
    assert_conserved(engine, committed=one.committed)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_its_questions_rest_in_pauses(mode: PauseMode) -> None:
    controller = ScriptedController(script)
    judger = LLMJudger(controller, prompt=ask, parse=read)
    spec = task(judger, strategy=AsyncStrategy(max_staleness=2))
    async with Engine(controller, spec, tokenizer=TOKENIZER, batch_size=8) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 8)
            await sleep(1.0)
            assert [a.attempt.prompt_ids.tolist() for a in controller.open.values()] == [
                QUESTION
            ] * 16
            async with engine.paused(mode, grace=0.1) as pause:
                await sleep(60)
                assert controller.while_paused == 0
                await pause.update_weights({})
    assert engine.statistics().total("delivered") == 8
    assert_conserved(engine, committed=controller.committed)


async def test_another_controller_than_the_engines_is_not_taken_for_the_policy() -> None:
    other = ScriptedController(script)
    said = failure(await judged(LLMJudger(other, prompt=ask, parse=read)))
    assert "is not the engine's controller; say uses_policy=False" in said


async def test_without_a_tokenizer_there_is_no_text_to_read() -> None:
    controller = ScriptedController(lambda _: Reply([10, 11]))
    judger = LLMJudger(controller, prompt=lambda s: s.turns[-1].ids.tolist(), parse=read)
    said = failure(await judged(judger, controller, tokenizer=None))
    assert "the engine has no tokenizer, so the policy's answer has no text" in said


def nothing(text: str) -> Any:
    return None


def the_text(text: str) -> Any:
    return text


def a_reason(text: str) -> Any:
    return {"why": text}


@pytest.mark.parametrize(
    ("parse", "said"),
    [
        (nothing, "the judger answered None, which is no score"),
        (the_text, "the judger answered 'good', which is no score"),
        (float, "could not convert string to float: 'good'"),
        (a_reason, "has no 'score', only ['why']"),
    ],
)
async def test_no_verdict_is_no_score(parse: Callable[[str], Any], said: str) -> None:
    controller = ScriptedController(script)
    judger = LLMJudger(controller, prompt=ask, parse=parse)
    assert said in failure(await judged(judger, controller))


async def test_no_question_is_asked_of_nobody() -> None:
    controller = ScriptedController(script)
    judger = LLMJudger(controller, prompt=lambda sample: "", parse=read)
    said = failure(await judged(judger, controller))
    assert "prompt made no question of 'task/p/0/0': ''" in said


# A controller of one's own


def own(script: Callable[[Attempt], Reply] = script, **options: Any) -> ScriptedController:
    return ScriptedController(script, **options)


def with_own(controller: ScriptedController, **options: Any) -> LLMJudger:
    defaults: dict[str, Any] = {"prompt": ask, "parse": read, "tokenizer": TOKENIZER}
    return LLMJudger(controller, uses_policy=False, **(defaults | options))


async def test_a_controller_of_ones_own_judges_in_pauses_too() -> None:
    async with own() as judge:
        policy = ScriptedController(script)
        spec = task(with_own(judge, concurrency=4), strategy=AsyncStrategy(max_staleness=2))
        async with Engine(policy, spec, tokenizer=TOKENIZER, batch_size=8) as engine:
            async with create_task_group() as tasks:
                tasks.start_soon(engine.next_batch, 8)
                await sleep(0.6)
                assert len(judge.open) == 4
                async with engine.paused():
                    await sleep(60)
                    assert judge.committed == 32
        assert engine.statistics().judge_tokens == 0
        assert_conserved(engine, committed=policy.committed)


async def test_what_may_pass_is_asked_again() -> None:
    replies = [
        Reply([], error=InferenceError("503: busy", retryable=True)),
        Reply([20, 21], finish="abort"),
        Reply([20, EOS]),
    ]
    async with own(lambda _: replies.pop(0)) as judge:
        assert (await judged(with_own(judge))).reward == 1.0
        assert len(judge.prompts) == 3
    async with own(lambda _: Reply([], error=InferenceError("400: no"))) as judge:
        assert "400: no" in failure(await judged(with_own(judge)))
        assert len(judge.prompts) == 1
    async with own(lambda _: Reply([20], finish="abort")) as judge:
        assert "the judge's answer was aborted" in failure(await judged(with_own(judge, tries=2)))
        assert len(judge.prompts) == 2


async def test_an_answer_that_breaks_a_rule_is_no_verdict() -> None:
    async with own(lambda _: Reply([20, 5000])) as judge:
        assert "outside the vocabulary of 1000" in failure(await judged(with_own(judge)))
    async with own(max_context=2) as judge:
        said = failure(await judged(with_own(judge)))
        assert f"a question of {len(QUESTION)} tokens leaves no room in a context of 2" in said


async def test_messages_and_ids_may_be_asked() -> None:
    async with own() as judge:
        messages = [{"role": "user", "content": "ab?"}]
        for question in (messages, QUESTION, tuple(QUESTION)):

            def asks(sample: Sample, question: Any = question) -> Any:
                return question

            assert (await judged(with_own(judge, prompt=asks))).reward == 1.0
        assert judge.prompts == [QUESTION] * 3


# A server


def chat(reply: Any) -> Callable[[Exchange], Any]:
    async def handler(exchange: Exchange) -> None:
        if exchange.request.path != "/v1/chat/completions":
            await exchange.reply({"error": "not found"}, status=404)
        else:
            await exchange.reply(reply)

    return handler


def says(text: Any, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}


def at(url: str, **options: Any) -> LLMJudger:
    defaults: dict[str, Any] = {"prompt": ask, "parse": read, "model": "judge-7b"}
    return LLMJudger(url, **(defaults | options))


@by_hand
@pytest.mark.parametrize("root", ["", "/", "/v1", "/v1/"])
async def test_a_server_is_asked_by_the_chat_route(root: str) -> None:
    server = LoopbackServer(chat(says("good")))
    async with server.serve():
        assert (await judged(at(server.url + root, api_key="sk-1234"))).reward == 1.0
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer sk-1234"
    assert request.json() == {
        "model": "judge-7b",
        "messages": [{"role": "user", "content": "ab?"}],
        "max_tokens": 512,
        "temperature": 0.0,
        "top_p": 1.0,
    }


@by_hand
async def test_sampling_is_sent_in_the_servers_words() -> None:
    sampling = Sampling(
        64,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        stop=["END"],
        stop_token_ids=[7],
        seed=0,
    )
    server = LoopbackServer(chat(says("bad")))
    async with server.serve():
        assert (await judged(at(server.url, sampling=sampling))).reward == 0.0
    sent = server.requests[0].json()
    del sent["messages"], sent["model"]
    assert sent == {
        "max_tokens": 64,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop": ["END"],
        "stop_token_ids": [7],
        "seed": 0,
    }


USELESS: list[tuple[Any, str]] = [
    (says(None, finish_reason="length"), "answered without text (finish_reason 'length')"),
    (says(["good"]), "answered without text (finish_reason 'stop')"),
    ({"choices": []}, "answered without a message: {'choices': []}"),
    ({"choices": [{}]}, "answered without a message: {'choices': [{}]}"),
    ({"choices": [7]}, "answered without a message"),
    ({"choices": {"a": 1}}, "answered without a message"),
    ({"error": "overloaded"}, "answered without a message: {'error': 'overloaded'}"),
    ([], "answered without a message: []"),
    (None, "answered without a message: None"),
    (says(""), "KeyError: ''"),
]


@by_hand
@pytest.mark.parametrize(("reply", "said"), USELESS)
async def test_bug_091_answers_without_text_are_no_verdict(reply: Any, said: str) -> None:
    server = LoopbackServer(chat(reply))
    if reply is None:
        server = LoopbackServer(chat(b"null"))
    async with server.serve():
        assert said in failure(await judged(at(server.url)))


@by_hand
async def test_a_server_is_not_asked_with_ids() -> None:
    server = LoopbackServer(chat(says("good")))

    def ids(sample: Sample) -> list[int]:
        return [1, 2]

    async with server.serve():
        said = failure(await judged(at(server.url, prompt=ids)))
    assert "a server is asked with text or messages, got ids: [1, 2]" in said
    assert not server.requests


@pytest.mark.parametrize(
    ("model_at", "options", "error", "named"),
    [
        ("http://h", {"model": None}, TypeError, "model must be a string, got None"),
        ("http://h", {"model": " "}, ValueError, "model must not be empty, got ' '"),
        ("h:8000", {}, ValueError, "model_at must look like http://host:port"),
        ("http://h", {"uses_policy": True}, ValueError, "'http://h' would be asked past its gate"),
        ("http://h", {"uses_policy": 1}, TypeError, "uses_policy must be True, False or None, got 1"),
        ("http://h", {"tokenizer": TOKENIZER}, ValueError, "tokenizer is for a controller of your own only"),
        ("http://h", {"timeout": 0}, ValueError, "timeout must be > 0 and finite, got 0"),
        ("http://h", {"tries": 0}, ValueError, "tries must be >= 1, got 0"),
        ("http://h", {"sampling": 5}, TypeError, "sampling must be a Sampling, got 5"),
        ("http://h", {"prompt": None}, TypeError, "prompt must be a function, got None"),
        ("http://h", {"parse": "x"}, TypeError, "parse must be a function, got 'x'"),
        ("http://h", {"sampling": Sampling(5, seed="derived")}, ValueError, "'derived' is for the policy"),
        (own(), {}, ValueError, "model is for a server only, got 'judge-7b'"),
        (own(), {"model": None, "api_key": "sk-9"}, ValueError, r"api_key is for a server only, got \*\*\*"),
        (own(), {"model": None, "rate": 2.0}, ValueError, "rate is for a server or a controller of your own only"),
        (own(), {"model": None, "tokenizer": TOKENIZER}, ValueError, "tokenizer is for a controller of your own only"),
        (own(), {"model": None, "uses_policy": False}, ValueError, "tokenizer is needed for a controller of your own"),
    ],
)  # fmt: skip
async def test_bad_options(
    model_at: Any, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    defaults: dict[str, Any] = {"prompt": ask, "parse": read, "model": "judge-7b"}
    with pytest.raises(error, match=named):
        LLMJudger(model_at, **(defaults | options))


async def test_judgers_show_whom_they_ask_and_no_key() -> None:
    assert repr(at("http://h/v1", api_key="sk-1234")) == (
        "LLMJudger('judge-7b' at http://h/v1/chat/completions)"
    )
    assert repr(HttpJudger("http://h/judge", api_key="sk-1234")) == "HttpJudger('http://h/judge')"
    policy = own()
    assert repr(LLMJudger(policy, prompt=ask, parse=read)) == f"LLMJudger(the policy at {policy!r})"


async def test_an_evaluation_is_judged_by_the_policy_too() -> None:
    controller = ScriptedController(script)
    judger = LLMJudger(controller, prompt=ask, parse=read)
    spec = task(judger, limits=Limits(judge=5.0))
    async with Engine(controller, spec, tokenizer=TOKENIZER) as engine:
        result = await engine.evaluate("task", limit=3)
    assert result.score == 1.0
