"""Judgers that ask an HTTP service: what is posted, what may be answered, and what becomes of everything else."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from rollnest import (
    Capacity,
    ComposedJudger,
    Engine,
    Limits,
    Prompt,
    Rollout,
    Sample,
    Status,
    TaskSpec,
    Verdict,
)
from rollnest.testing import RecordingInstrument, Reply, ScriptedController
from rollnest.testing.servers import Exchange, LoopbackServer
from rollnest_adapters.judgers import HttpJudger, sample_payload

from .hand_clock import advance, hand_backends
from .toy_tokenizer import ToyTokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_connection_ages")]

KEY = "sk-verysecret0123456789"

Answer = Callable[[Exchange], Awaitable[None]]


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


def answers(*replies: Any, status: int = 200) -> Answer:
    """Gives these answers one after the other, and the last one for ever; a callable is run."""
    left = list(replies)

    async def handler(exchange: Exchange) -> None:
        reply: Any = left.pop(0) if len(left) > 1 else left[0]
        if callable(reply):
            await cast("Answer", reply)(exchange)
        else:
            await exchange.reply(reply, status=status)

    return handler


def says(status: int, body: Any = None, **headers: str) -> Answer:
    async def reply(exchange: Exchange) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await exchange.reply(body, status=status, headers=named)

    return reply


async def drops(exchange: Exchange) -> None:
    await exchange.drop()


async def says_nothing(exchange: Exchange) -> None:
    await exchange.gone.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Lets sockets work until something holds."""
    while not condition():
        await checkpoint()


def policy() -> ScriptedController:
    return ScriptedController(lambda _: Reply([10, 11, 9]))


TOKENIZER = ToyTokenizer({10: "a", 11: "b"})


def task(judger: Any, **options: Any) -> TaskSpec:
    defaults: dict[str, Any] = {
        "name": "maths",
        "prompts": [
            Prompt(
                "p",
                messages=[{"role": "user", "content": "1 + 1"}],
                label=2,
                data_source="sums",
                meta={"level": 1},
            )
        ],
        "judger": judger,
        "group_size": 1,
        "epochs": 1,
    }
    return TaskSpec(**(defaults | options))


async def judged(judger: Any, **options: Any) -> list[Sample]:
    """All samples of one group, as the engine has judged them."""
    heard = RecordingInstrument()
    engine = Engine(policy(), task(judger, **options), tokenizer=TOKENIZER, instruments=[heard])
    async with engine:
        async for _ in engine.batches(1):
            pass
    ((group, _),) = heard.groups
    return list(group.samples)


async def verdict(handler: Answer, **options: Any) -> Verdict:
    server = LoopbackServer(handler)
    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url + "/judge", **options))
    assert sample.verdict is not None
    return sample.verdict


async def failure(handler: Answer, **options: Any) -> str:
    server = LoopbackServer(handler)
    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url + "/judge", tries=1, **options))
    assert sample.status is Status.FAILED
    assert sample.reward is None
    assert sample.failure is not None
    assert sample.failure.kind == "judge"
    return sample.failure.message


# What is asked, and what may be answered


async def test_a_sample_is_posted_and_its_verdict_comes_back() -> None:
    server = LoopbackServer(answers({"score": 0.5, "why": "half of it"}))
    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url + "/judge", api_key=KEY))
    assert sample.verdict == Verdict(0.5, details={"why": "half of it"})
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/judge")
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.json() == {
        "uid": "maths/p/0/0",
        "data_source": "sums",
        "label": 2,
        "meta": {"level": 1},
        "messages": [{"role": "user", "content": "1 + 1"}],
        "response": "ab",
        "response_ids": [10, 11, 9],
        "turns": [{"text": "ab", "finish_reason": "stop"}],
        "finish_reason": "stop",
    }


@pytest.mark.parametrize(
    ("answer", "score"), [(1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), ({"score": -2}, -2.0)]
)
async def test_bug_046_answers_that_are_verdicts(answer: Any, score: float) -> None:
    assert (await verdict(answers(answer))).score == score


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"null", "the judger answered None, which is no score"),
        (b'"0.5"', "the judger answered '0.5', which is no score"),
        (b"[1]", r"the judger answered [1], which is no score"),
        (b'{"reward": 1}', "mapping has no 'score', only ['reward']"),
        (b'{"score": null}', "the judger answered None, which is no score"),
        (b'{"score": 1e999}', "out of range"),
        (b"NaN", "the answer is no JSON: 'NaN'"),
        (b"", "the answer is no JSON: ''"),
        (b"<html>busy</html>", "the answer is no JSON: '<html>busy</html>'"),
        (b"{" * 5000, "the answer is no JSON: '{{{"),
    ],
)
async def test_bug_091_answers_that_are_no_verdict_fail_the_sample(body: bytes, said: str) -> None:
    assert said in await failure(answers(body))


async def test_request_and_parse_make_other_words_of_it() -> None:
    server = LoopbackServer(answers({"result": {"points": 7}}))

    def request(sample: Sample) -> Any:
        return {"answer": sample.turns[-1].text, "gold": sample.prompt.label}

    def parse(answer: Any) -> Verdict:
        return Verdict(answer["result"]["points"] / 10, parts={"points": 7.0})

    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url, request=request, parse=parse))
        assert sample.verdict == Verdict(0.7, parts={"points": 7.0})
        assert server.requests[0].json() == {"answer": "ab", "gold": 2}
        assert server.requests[0].path == "/"


async def test_parse_that_finds_nothing_fails_the_sample() -> None:
    def parse(answer: Any) -> float:
        return float(answer["points"])

    assert "KeyError: 'points'" in await failure(answers({}), parse=parse)


async def test_what_is_no_json_is_not_posted() -> None:
    server = LoopbackServer(answers(1))
    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url, request=lambda _: {"x": object()}))
    assert sample.failure is not None
    assert "what is posted must be JSON" in sample.failure.message
    assert not server.requests


async def test_bug_048_the_response_is_what_the_policy_said() -> None:
    server = LoopbackServer(answers(1))

    async def with_tool(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([41, 42])
        await rollout.generate()

    async with server.serve():
        await judged(HttpJudger(server.url), loop=with_tool, max_response_tokens=50)
    posted = server.requests[0].json()
    assert posted["response"] == "abab"
    assert posted["response_ids"] == [10, 11, 9] * 2


async def test_bug_050_a_group_is_posted_together() -> None:
    server = LoopbackServer(answers([2, {"score": 0}, 1.5]))
    async with server.serve():
        samples = await judged(HttpJudger(server.url, judges_groups=True), group_size=3)
    assert [sample.reward for sample in samples] == [2.0, 0.0, 1.5]
    (request,) = server.requests
    assert [member["uid"] for member in request.json()] == [f"maths/p/0/{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1, 0], "gave 2 answers for 3 samples"),
        ([1, 0, 1, 1], "gave 4 answers for 3 samples"),
        ({"score": 1}, "a group's answer must be a list, got {'score': 1}"),
        ([1, None, 1], "answer 1 of batch_judge: the judger answered None"),
    ],
)
async def test_bug_047_a_wrong_answer_for_a_group_fails_all(answer: Any, said: str) -> None:
    server = LoopbackServer(answers(answer))
    async with server.serve():
        samples = await judged(HttpJudger(server.url, judges_groups=True), group_size=3)
    assert all(sample.status is Status.FAILED for sample in samples)
    assert all(said in sample.failure.message for sample in samples if sample.failure)


async def test_bug_049_it_is_the_same_as_a_part_of_others() -> None:
    server = LoopbackServer(answers(0.5))

    def double(answer: Any) -> float:
        return 2 * float(answer)

    async with server.serve():
        judger = HttpJudger(server.url, parse=double)
        (alone,) = await judged(judger)
        (part,) = await judged(ComposedJudger({"http": judger}))
    assert alone.reward == part.reward == 1.0


# What goes wrong


async def test_bug_051_a_service_that_fails_is_no_reward_of_zero() -> None:
    assert "status 500" in await failure(says(500, {"error": "no GPU"}))
    assert "HttpError" in await failure(drops)
    refused = HttpJudger("http://127.0.0.1:9/judge", tries=1)
    (sample,) = await judged(refused)
    assert sample.failure is not None
    assert sample.reward is None


async def test_bug_085_a_refusal_is_not_asked_again_and_a_glitch_is() -> None:
    server = LoopbackServer(says(400, {"error": "no label"}))
    async with server.serve():
        (sample,) = await judged(HttpJudger(server.url))
    assert len(server.requests) == 1
    assert sample.failure is not None
    assert "no label" in sample.failure.message

    server = LoopbackServer(answers(says(503), drops, 1.0))
    samples: list[Sample] = []
    async with server.serve(), create_task_group() as tasks:

        async def judge() -> None:
            judger = HttpJudger(server.url, timeout=1e9)  # nothing but waiting takes time here
            samples.extend(await judged(judger, limits=Limits(judge=None)))

        tasks.start_soon(judge)
        while not samples:
            await advance(0.25)
    assert samples[0].reward == 1.0
    assert len(server.requests) == 3


async def test_a_service_that_says_nothing_is_given_up() -> None:
    server = LoopbackServer(says_nothing)
    samples: list[Sample] = []
    async with server.serve(), create_task_group() as tasks:

        async def judge() -> None:
            samples.extend(await judged(HttpJudger(server.url, tries=1, timeout=10.0)))

        tasks.start_soon(judge)
        await until(lambda: bool(server.requests))
        await advance(9.9)
        assert not samples
        await advance(0.2)
        await until(lambda: bool(samples))
    assert samples[0].failure is not None
    assert "the server said nothing for 10.0 s" in samples[0].failure.message


async def test_the_engines_limit_holds_too() -> None:
    server = LoopbackServer(says_nothing)
    samples: list[Sample] = []
    async with server.serve(), create_task_group() as tasks:

        async def judge() -> None:
            samples.extend(await judged(HttpJudger(server.url), limits=Limits(judge=5.0)))

        tasks.start_soon(judge)
        await until(lambda: bool(server.requests))
        await advance(5.1)
        await until(lambda: bool(samples))
    assert samples[0].failure is not None
    assert "the judger took over 5.0 s" in samples[0].failure.message


async def test_the_key_is_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    said = await failure(says(401, {"error": f"{KEY} is no key"}), api_key=KEY)
    assert "is no key" in said
    assert KEY not in said
    assert KEY not in caplog.text
    assert KEY not in repr(HttpJudger("http://127.0.0.1:9", api_key=KEY))


# Many


async def test_bug_087_calls_share_a_few_connections() -> None:
    most = now = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        for _ in range(20):
            await checkpoint()
        now -= 1
        await exchange.reply(1)

    server = LoopbackServer(handler)
    async with server.serve():
        samples = await judged(HttpJudger(server.url, concurrency=8), group_size=200)
    assert [sample.reward for sample in samples] == [1.0] * 200
    assert most <= 8
    assert server.connections <= 8


async def test_nothing_is_left_open_after_the_last_call() -> None:
    server = LoopbackServer(answers(1))
    async with server.serve():
        judger = HttpJudger(server.url)
        for _ in range(3):
            await judged(judger)
    assert server.connections == 3


async def test_a_judgement_that_is_cancelled_drops_its_request() -> None:
    gone = anyio.Event()

    async def handler(exchange: Exchange) -> None:
        await exchange.gone.wait()
        gone.set()

    server = LoopbackServer(handler)
    async with server.serve():
        engine = Engine(
            policy(),
            task(HttpJudger(server.url)),
            tokenizer=TOKENIZER,
            capacity=Capacity(judges=1),
        )
        async with engine, create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 1)
            await until(lambda: bool(server.requests))
            tasks.cancel_scope.cancel()
        await until(gone.is_set)


def test_one_judger_works_in_several_event_loops() -> None:
    async def ask(judger: HttpJudger, server: LoopbackServer, port: int) -> float | None:
        async with server.serve(port):
            (sample,) = await judged(judger)
        return sample.reward

    async def free_port() -> int:
        server = LoopbackServer(answers(1))
        async with server.serve():
            return int(server.url.rpartition(":")[2])

    port = anyio.run(free_port)
    judger = HttpJudger(f"http://127.0.0.1:{port}")
    for backend in ("asyncio", "trio", "asyncio"):
        assert anyio.run(ask, judger, LoopbackServer(answers(1)), port, backend=backend) == 1.0


@pytest.mark.parametrize(
    ("url", "options", "error", "named"),
    [
        ("127.0.0.1:8000", {}, ValueError, "url must look like http://host:port"),
        ("http://user:pw@host", {}, ValueError, "url must not hold a user or a password"),
        ("http://host?x=1", {}, ValueError, "url must have no query"),
        (8000, {}, TypeError, "url must be a str, got 8000"),
        ("http://host", {"timeout": 0}, ValueError, "timeout must be > 0 and finite, got 0"),
        ("http://host", {"concurrency": 0}, ValueError, "concurrency must be >= 1, got 0"),
        ("http://host", {"rate": -1}, ValueError, "rate must be > 0 and finite, got -1"),
        ("http://host", {"tries": None}, TypeError, "tries must be an int, got None"),
        ("http://host", {"api_key": "a b"}, ValueError, "api_key must be printable ASCII"),
        ("http://host", {"parse": 1}, TypeError, "parse must be a function, got 1"),
        ("http://host", {"request": None}, TypeError, "request must be a function, got None"),
        ("http://host", {"judges_groups": 1}, TypeError, "judges_groups must be True or False, got 1"),
    ],
)  # fmt: skip
async def test_bad_options(
    url: Any, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        HttpJudger(url, **options)


async def test_the_payload_without_a_tokenizer_has_ids_only() -> None:
    server = LoopbackServer(answers(1))
    async with server.serve():
        heard = RecordingInstrument()
        spec = task(HttpJudger(server.url), prompts=[Prompt("p", token_ids=[1])])
        async with Engine(policy(), spec, instruments=[heard]) as engine:
            await engine.next_batch(1)
    posted = server.requests[0].json()
    assert posted["response"] is None
    assert posted["response_ids"] == [10, 11, 9]
    assert posted == {**sample_payload(heard.samples[0]), "finish_reason": "stop"}
