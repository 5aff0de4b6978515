"""The vLLM controller, and the engine on it, against a real vLLM with a real model.

Whatever a test does to the weights, the next one begins with the first model's: `opened` loads them.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import anyio
import anyio.to_thread
import httpx2
import pytest
from attrs import evolve

from rollnest import (
    AsyncStrategy,
    Attempt,
    Capacity,
    Engine,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest.abc import FinishReason
from rollnest.errors import InferenceError
from rollnest.testing import RecordingInstrument, assert_conserved, check_sample
from rollnest.testing.servers import VllmServer
from rollnest_adapters.pool import ControllerPool
from rollnest_adapters.vllm import VllmController
from tests.vllm_requests import (
    MAX_CONTEXT,
    RECORDED,
    VOCABULARY,
    asked,
    record,
    refused,
    said,
)

from .place import MODELS, ROOT, VENV
from .scoring import MEAN_TOLERANCE, TOKEN_TOLERANCE, Scorer
from .server import Vllm

pytestmark = pytest.mark.anyio

BOS = 1
ENOUGH = 256
"""Tokens whose mean says something."""


def prompt(number: int) -> list[int]:
    """Ids that mean nothing much, different for each number."""
    return [BOS, 504, 3575, 28, 1000 + 7 * number, 314, 253]


def one(number: int, *, version: int, max_tokens: int = 64, **sampling: Any) -> Attempt:
    """An attempt that runs to its cap, or nearly."""
    options = Sampling(max_tokens, min_tokens=max_tokens, **sampling)
    return Attempt(
        prompt(number),
        max_tokens=max_tokens,
        sampling=options,
        version=version,
        vocab_size=VOCABULARY,
        affinity=f"rollout-{number}",
    )


@asynccontextmanager
async def opened(vllm: Vllm, **options: Any) -> AsyncGenerator[tuple[VllmController, int]]:
    """A controller, the first model loaded, and the version of that."""
    async with VllmController(vllm.url, **options) as controller:
        before = await controller.version()
        assert before is not None
        await update(controller, 0, before + 1)
        yield controller, before + 1


async def update(controller: VllmController, model: int, version: int) -> None:
    """Loads one of the models, in a pause."""
    await controller.pause(PauseMode.ABORT)
    await controller.update_weights(str(MODELS[model]), version)
    await controller.resume()


def distance(scored: Sequence[float], given: Sequence[float]) -> float:
    """Mean |difference|."""
    return sum(abs(a - b) for a, b in zip(scored, given, strict=True)) / len(scored)


def distances(attempts: Sequence[Attempt], scorer: Scorer, *, temperature: float = 1.0) -> float:
    """How far a model's logprobs are from those that came, over all tokens."""
    tables = scorer.many(
        [[*attempt.prompt_ids, *attempt.received.ids] for attempt in attempts],
        temperature=temperature,
    )
    pairs = zip(attempts, tables, strict=True)
    scored = [p for attempt, table in pairs for p in table[len(attempt.prompt_ids) - 1 :]]
    return distance(scored, [p for attempt in attempts for p in attempt.received.logprobs])


# Requests


@pytest.mark.parametrize("stream_every", [None, 8], ids=["whole", "stream"])
async def test_tokens_and_logprobs_come_with_their_version(
    vllm: Vllm, stream_every: int | None
) -> None:
    async with opened(vllm, stream_every=stream_every) as (controller, version):
        known = controller.capabilities
        assert (known.vocab_size, known.max_context) == (VOCABULARY, MAX_CONTEXT)
        assert known.logprobs == "processed"
        attempt = one(0, version=version)
        await controller.generate(attempt)
        assert attempt.finish_reason is FinishReason.LENGTH
        assert attempt.received.version_runs == ((version, 0, 64),)
        health = await controller.health()
        assert health.running == 0
        assert health.waiting == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_forward_pass(
    vllm: Vllm, scorers: tuple[Scorer, Scorer], temperature: float
) -> None:
    async with opened(vllm) as (controller, version):
        attempts = [one(i, version=version, temperature=temperature) for i in range(8)]
        async with anyio.create_task_group() as tasks:
            for attempt in attempts:
                tasks.start_soon(controller.generate, attempt)
    near = distances(attempts, scorers[0], temperature=temperature)
    far = distances(attempts, scorers[1], temperature=temperature)
    print(f"mean |difference|: {near:.4f}, of the other model {far:.3f}")
    assert near < MEAN_TOLERANCE / temperature
    assert far > 10 * MEAN_TOLERANCE / temperature


async def test_a_stop_id_ends_the_answer_and_is_in_it(vllm: Vllm) -> None:
    async with opened(vllm) as (controller, version):
        whole = one(1, version=version, temperature=0.0, max_tokens=12)
        await controller.generate(whole)
        stop = whole.received.ids.tolist()[6]
        sampling = Sampling(12, temperature=0.0, stop_token_ids=(stop,))
        attempt = Attempt(prompt(1), max_tokens=12, sampling=sampling, version=version)
        await controller.generate(attempt)
        assert attempt.finish_reason is FinishReason.STOP
        cut = whole.received.ids.tolist().index(stop) + 1
        assert attempt.received.ids.tolist() == whole.received.ids.tolist()[:cut]


@pytest.mark.parametrize("stream_every", [None, 8], ids=["whole", "stream"])
async def test_sixty_four_in_flight_are_aborted_with_their_partials(
    vllm: Vllm, stream_every: int | None
) -> None:
    async with opened(vllm, stream_every=stream_every) as (controller, version):
        attempts, started = [one(i, version=version, max_tokens=512) for i in range(64)], 0.0
        async with anyio.create_task_group() as tasks:
            for attempt in attempts:
                tasks.start_soon(controller.generate, attempt)
            await until_running(controller, 64)
            await until_made(vllm, 64 * 8)
            started = anyio.current_time()
            await controller.abort(None)
        took = anyio.current_time() - started
        received = [len(attempt.received) for attempt in attempts]
        print(f"64 came back after {took:.3f} s with {sum(received)} tokens")
        assert all(attempt.finish_reason is FinishReason.ABORT for attempt in attempts)
        assert all(1 <= count < 512 for count in received)
        await until_running(controller, 0)


async def test_a_cancelled_request_is_worked_on_no_more(vllm: Vllm) -> None:
    async with opened(vllm) as (controller, version):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, one(0, version=version, max_tokens=1500))
            await until_running(controller, 1)
            tasks.cancel_scope.cancel()
        await until_running(controller, 0)


async def until_running(controller: VllmController, count: int) -> None:
    """Waits until the server works on so many."""
    while (await controller.health()).running != count:
        await anyio.sleep(0.05)


async def until_made(vllm: Vllm, count: int) -> None:
    """Waits until the server has made so many tokens from now on."""

    async def made() -> float:
        text = (await client.get("/metrics")).text
        (line,) = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        return float(line)

    async with httpx2.AsyncClient(base_url=vllm.url) as client:
        enough = await made() + count
        while await made() < enough:
            await anyio.sleep(0.05)


# Weights


@pytest.mark.parametrize("stream_every", [None, 8], ids=["whole", "stream"])
async def test_frozen_turns_go_on_under_new_weights(
    exact: Vllm, scorers: tuple[Scorer, Scorer], stream_every: int | None
) -> None:
    async with opened(exact, stream_every=stream_every) as (controller, version):
        attempts, times = [one(i, version=version, max_tokens=96) for i in range(8)], [0.0]
        async with anyio.create_task_group() as tasks:
            for attempt in attempts:
                tasks.start_soon(controller.generate, attempt)
            await until_running(controller, 8)
            await until_made(exact, 8 * 16)
            times = [anyio.current_time()]
            await controller.pause(PauseMode.KEEP)
            times.append(anyio.current_time())
            await controller.update_weights(str(MODELS[1]), version + 1)
            times.append(anyio.current_time())
            await controller.resume()
            times.append(anyio.current_time())
        pause, load, resume = (b - a for a, b in pairwise(times))
        print(f"pause {pause:.3f} s, update {load:.3f} s, resume {resume:.3f} s")
        for attempt in attempts:
            (old, _, stop), (new, again, end) = attempt.received.version_runs
            assert (old, new, end) == (version, version + 1, 96)
            assert 1 <= stop == again < 96
    rows = [
        Row(attempt.prompt_ids.tolist(), attempt.received.ids.tolist(),
            list(attempt.received.logprobs), list(attempt.received.versions))
        for attempt in attempts
    ]  # fmt: skip
    agrees(rows, {version: scorers[0], version + 1: scorers[1]}, scored_by(rows, scorers))


class Row(NamedTuple):
    """A turn: what it continues, and each token's id, logprob and version."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]


Tables: TypeAlias = dict[Scorer, list[list[float]]]
"""What each model gives the tokens of all rows."""


def scored_by(rows: Sequence[Row], scorers: Iterable[Scorer]) -> Tables:
    return {scorer: scorer.many([[*r.prompt, *r.ids] for r in rows]) for scorer in set(scorers)}


def agrees(rows: Sequence[Row], loaded: dict[int, Scorer], tables: Tables) -> None:
    """Each token is as the weights of its version give it; with versions shifted by one, none's are."""
    one, two = tables
    right: dict[int, list[float]] = defaultdict(list)
    wrong: dict[int, list[float]] = defaultdict(list)
    apart: list[float] = []
    most = (0.0, "")
    for number, row in enumerate(rows):
        for at, (logprob, version) in enumerate(
            zip(row.logprobs, row.versions, strict=True), len(row.prompt) - 1
        ):
            scored = {scorer: table[number][at] for scorer, table in tables.items()}
            other = two if loaded[version] is one else one
            off = abs(scored[loaded[version]] - logprob)
            place = at - len(row.prompt) + 1
            said = f"{logprob:.2f}, the other weights {scored[other]:.2f}, token {place} of {runs(row.versions)}"
            most = max(most, (off, said))
            right[version].append(off)
            wrong[version].append(abs(scored[other] - logprob))
            apart.append(abs(scored[one] - scored[two]))
    for version in sorted(right):
        print(
            f"v{version}: {len(right[version])} tokens, mean |difference| {fmean(right[version]):.4f}; "
            f"shifted by one {fmean(wrong[version]):.3f}"
        )
    print(
        f"in all {fmean(flat(right)):.4f}, shifted {fmean(flat(wrong)):.3f}; models apart {fmean(apart):.3f}"
    )
    print(f"most of a token {most[0]:.3f} (of {most[1]}); shifted {max(flat(wrong)):.3f}")
    assert fmean(apart) > 10 * MEAN_TOLERANCE
    assert max(flat(right)) < TOKEN_TOLERANCE
    assert max(flat(wrong)) > 1.0
    assert fmean(flat(wrong)) > 10 * MEAN_TOLERANCE
    for version in right:
        if len(right[version]) >= ENOUGH:
            assert fmean(wrong[version]) > 10 * MEAN_TOLERANCE, version


def moved(rows: Sequence[Row], every: int) -> list[Row]:
    """The same, but in one row of so many the last token before each update has the version after it."""
    return [
        row._replace(versions=[*row.versions[1:], row.versions[-1]]) if at % every == 0 else row
        for at, row in enumerate(rows)
    ]


def runs(versions: Sequence[int]) -> str:
    """Which versions made a turn, and where each begins."""
    starts = [i for i, v in enumerate(versions) if not i or v != versions[i - 1]]
    return ", ".join(f"v{versions[i]} from {i}" for i in starts)


def flat(by_version: dict[int, list[float]]) -> list[float]:
    return [figure for figures in by_version.values() for figure in figures]


class Attempts(RecordingInstrument):
    """Keeps the attempts themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Attempt] = []

    def turn_started(self, attempt: Attempt) -> None:
        self.seen.append(attempt)


async def score_one(sample: Sample) -> float:
    return 1.0


async def different_lengths(rollout: Rollout) -> None:
    """Answers end one after the other, so every update finds others in the middle."""
    length = 16 + 13 * int(rollout.prompt.uid[1:]) % 32
    await rollout.generate(sampling=Sampling(length, min_tokens=length))


async def test_twenty_updates_under_thirty_two_rollouts(
    exact: Vllm, scorers: tuple[Scorer, Scorer]
) -> None:
    """No token is lost, and each has the version of the weights that made it."""
    least, most = 20, 80
    async with VllmController(exact.url) as controller:
        before = await controller.version()
        assert before is not None
        await update(controller, 0, before + 1)
    first = before + 1
    task = TaskSpec(
        "live",
        [Prompt(f"p{i}", token_ids=prompt(i)) for i in range(32)],
        judger=score_one,
        loop=different_lengths,
        group_size=1,
        strategy=AsyncStrategy(max_staleness=most, lead=4),
    )
    quiet: list[float] = []
    samples: list[Sample] = []
    crossing: list[Sample] = []
    cycles = 0
    async with Engine(
        VllmController(exact.url, version=first),
        task,
        batch_size=13,
        capacity=Capacity(turns=32),
        version=first,
        control_timeout=60.0,
    ) as engine:
        # However fast the machine is, there are enough: of 32 turns in flight 13 end between two updates.
        while cycles < least or (len(crossing) < 200 and cycles < most):
            batch = await engine.next_batch()
            samples += batch.samples
            crossing = [s for s in samples if len(s.segments[0].response.version_runs) > 1]
            cycles += 1
            async with engine.paused(PauseMode.KEEP if cycles % 2 else PauseMode.ABORT) as pause:
                quiet.append(pause.quiet_seconds)
                await pause.update_weights(str(MODELS[cycles % 2]))
        figures = engine.statistics()
        assert_conserved(engine)
    print(
        f"{len(crossing)} of {len(samples)} turns cross one of {cycles} updates; quiet after "
        f"{sorted(quiet)[len(quiet) // 2]:.3f} s (median), {max(quiet):.3f} s (most)"
    )
    assert figures.total("tokens_lost") == 0
    assert all(sample.status is Status.COMPLETED for sample in samples)
    for sample in samples:
        check_sample(sample)
    assert len(crossing) >= 200
    rows = [
        Row(segment.prompt_ids.tolist(), segment.response.ids.tolist(),
            list(segment.response.logprobs), list(segment.response.versions))
        for sample in samples for segment in sample.segments
    ]  # fmt: skip
    loaded = {first + cycle: scorers[cycle % 2] for cycle in range(cycles + 1)}
    tables = scored_by(rows, scorers)
    agrees(rows, loaded, tables)
    with pytest.raises(AssertionError):  # that would be seen
        agrees(moved(rows, 50), loaded, tables)


# Agent loops


async def three_turns(rollout: Rollout) -> None:
    """Asks, hears what a tool says, and asks again."""
    for number in range(3):
        await rollout.generate(max_tokens=12)
        rollout.append([2, 198, 1, 4093 + number, 198])


async def test_a_loop_of_three_turns_sends_exactly_the_ids_that_it_has(
    vllm: Vllm, scorers: tuple[Scorer, Scorer]
) -> None:
    async with opened(vllm) as (_, version):
        pass
    sent: list[list[int]] = []

    class Sent(RecordingInstrument):
        def turn_started(self, attempt: Attempt) -> None:
            sent.append(attempt.prompt_ids.tolist())

    task = TaskSpec(
        "tools",
        [Prompt("p", token_ids=prompt(3))],
        judger=score_one,
        loop=three_turns,
        group_size=1,
        sampling=Sampling(12, min_tokens=12),
    )
    controller = VllmController(vllm.url, version=version)
    async with Engine(controller, task, version=version, instruments=[Sent()]) as engine:
        batch = await engine.next_batch(1)
    (segment,) = batch.groups[0].samples[0].segments
    whole = [*segment.prompt_ids, *segment.response.ids]
    assert len(segment.response) == 3 * (12 + 5)
    assert sent == [whole[:7], whole[: 7 + 17], whole[: 7 + 34]]
    # The server saw them, too: its logprobs are those of a forward pass over the whole.
    scored = scorers[0].logprobs(whole)[6:]
    sampled = [at for at, mask in enumerate(segment.mask) if mask]
    assert len(sampled) == 36
    logprobs = segment.response.logprobs
    near = distance([scored[i] for i in sampled], [logprobs[i] for i in sampled])
    assert near < 2 * MEAN_TOLERANCE  # 36 tokens are few


# A server that is not as it should be


async def test_what_a_server_lacks_is_named(lacking: Vllm) -> None:
    with pytest.raises(InferenceError, match="VLLM_SERVER_DEV_MODE=1"):
        async with VllmController(lacking.url):
            pass
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    refused = httpx2.post(f"{lacking.url}/inference/v1/generate", json=body)
    assert refused.status_code == 403
    assert "--enable-scale-out" in refused.text


async def test_a_server_that_is_killed_and_started_again_costs_only_time(
    vllm: Vllm, anyio_backend: str
) -> None:
    """Turns go on from what they had: none of them is generated from zero."""
    async with opened(vllm) as (_, version):
        pass

    attempts = Attempts()
    task = TaskSpec(
        "killed",
        [Prompt(f"p{i}", token_ids=prompt(i)) for i in range(16)],
        judger=score_one,
        group_size=1,
        sampling=Sampling(160, min_tokens=160),
    )
    held: dict[str, int] = {}
    batch: Any = None
    figures: Any = None

    async def kill() -> None:
        while sum(len(attempt.received) >= 8 for attempt in attempts.seen) < 16:
            await anyio.sleep(0.05)
        vllm.kill()
        held.update({attempt.affinity: len(attempt.received) for attempt in attempts.seen})
        await anyio.to_thread.run_sync(vllm.start)
        # A restarted vLLM calls its weights "default" again, and holds those of its --model.
        label = {"new_version": str(version)}
        httpx2.post(f"{vllm.url}/update_weight_version", json=label).raise_for_status()

    controller = VllmController(vllm.url, version=version, stream_every=4)
    async with (
        anyio.create_task_group() as tasks,
        Engine(controller, task, version=version, instruments=[attempts]) as engine,
    ):
        tasks.start_soon(kill)
        batch = await engine.next_batch(16)
        figures = engine.statistics()
    samples = [group.samples[0] for group in batch.groups]
    assert all(sample.status is Status.COMPLETED for sample in samples)
    assert all(len(sample.segments[0].response) == 160 for sample in samples)
    assert figures.outages == 1
    assert figures.total("tokens_lost") == 0
    later = [attempt for attempt in attempts.seen[16:] if attempt.affinity in held]
    assert len(later) >= 16
    assert all(len(attempt.prompt_ids) >= 7 + held[attempt.affinity] for attempt in later)


async def test_one_of_two_servers_is_killed_under_a_hundred_rollouts(
    vllm: Vllm, second: Vllm
) -> None:
    """By the servers' own logs nothing that had come is generated again."""
    await anyio.to_thread.run_sync(second.start)
    versions: list[int] = []
    for server in (vllm, second):
        async with VllmController(server.url) as controller:
            versions.append(await controller.version() or 0)
    version = max(versions) + 1
    for server in (vllm, second):
        async with VllmController(server.url) as controller:
            await update(controller, 0, version)
    controllers = {
        name: VllmController(server.url, version=version, stream_every=4)
        for name, server in (("first", vllm), ("second", second))
    }
    attempts = Attempts()
    task = TaskSpec(
        "pool",
        [Prompt(f"p{i}", token_ids=prompt(i)) for i in range(100)],
        judger=score_one,
        group_size=1,
        epochs=1,
        sampling=Sampling(96, min_tokens=96),
    )
    held: list[Attempt] = []
    killed = anyio.Event()
    batch: Any = None
    figures: Any = None

    async def kill() -> None:
        while len(held) < 20 or sum(len(attempt.received) >= 8 for attempt in held) < 10:
            await anyio.sleep(0.1)
            there = second.asked()
            held[:] = [
                attempt
                for attempt in attempts.seen
                if attempt.id in there and attempt.finish_reason is None and not attempt.closed
            ]
        second.kill()
        killed.set()

    # However slow the machine is, a server that lives is not given up: that one is dead is seen at once.
    pool = ControllerPool(controllers, check_timeout=120.0)
    async with (
        anyio.create_task_group() as tasks,
        Engine(
            pool, task, version=version, instruments=[attempts], control_timeout=300.0
        ) as engine,
    ):
        tasks.start_soon(kill)
        batch = await engine.next_batch(100)
        figures = engine.statistics()
        assert killed.is_set(), f"all rollouts ended before the second server held enough: {held}"
        assert_conserved(engine)
    samples = [group.samples[0] for group in batch.groups]
    assert {sample.prompt.uid for sample in samples} == {f"p{i}" for i in range(100)}
    assert len(samples) == 100
    for sample in samples:
        assert sample.status is Status.COMPLETED
        check_sample(sample)
        assert len(sample.segments[0].response) == 96
    assert figures.outages == 0
    assert figures.total("tokens_lost") == 0
    mine = {attempt.id for attempt in attempts.seen}
    asked = Counter(
        tuple(ids)
        for server in (vllm, second)
        for id_, ids in server.asked().items()
        if id_ in mine
    )
    begun = [attempt for attempt in held if len(attempt.received)]
    assert len(begun) >= 10
    for attempt in begun:
        before, received = attempt.prompt_ids.tolist(), attempt.received.ids.tolist()
        assert asked[tuple(before)] == 1
        assert len(received) == 96 or asked[*before, *received] == 1
    print(f"the server that was killed held {len(held)} turns, {len(begun)} of them with tokens")


# The fault server and the real one


async def test_requests_are_answered_as_they_were_recorded(vllm: Vllm) -> None:
    """What the normal suite compares the controller and the fault server with."""
    calls = await asked()
    fake = VllmServer(vocab_size=VOCABULARY, max_context=MAX_CONTEXT)
    async with fake.serve():
        played = await said(fake.url, calls)
    good = await said(vllm.url, calls, model=str(MODELS[1]))
    bad = await said(vllm.url, refused(calls))
    # Of what it says more than the fault server, nobody reads anything.
    good = [
        evolve(one, keys=sorted({*one.keys} & {*other.keys}))
        for one, other in zip(good, played, strict=True)
    ]
    async with httpx2.AsyncClient(base_url=vllm.url) as client:
        version = (await client.get("/version")).json()["version"]
        paths = (await client.get("/openapi.json")).json()["paths"]
    text = record(good, bad, version)
    before = RECORDED.read_text(encoding="utf-8") if RECORDED.exists() else ""
    RECORDED.write_text(text, encoding="utf-8")
    assert text == before, f"{RECORDED} was written anew: look at what has changed"
    fields = annotated("scale_out/token_in_token_out/protocol.py", "GenerateRequest")
    known = annotated("../sampling_params.py", "SamplingParams")
    for _, path, _, body in calls:
        if path == VllmServer.generates:  # what it doesn't know it ignores without a word
            assert set(body) <= fields
            assert set(body["sampling_params"]) <= known
    for route in fake.routes():
        method, _, path = route.partition(" ")
        if path != "/metrics":  # mounted, and so not in the list
            assert method.lower() in paths[path], route


def annotated(path: str, name: str) -> set[str]:
    """Fields of a class in vLLM's sources."""
    (package,) = VENV.glob("lib/python3*/site-packages/vllm/entrypoints")
    tree = ast.parse((package / path).read_text())
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


# The example


async def test_the_example_trains(vllm: Vllm, anyio_backend: str, tmp_path: Path) -> None:
    async with opened(vllm):
        pass
    command = [
        *(sys.executable, str(ROOT / "docs" / "examples" / "grpo_vllm.py"), "--url", vllm.url),
        *("--model", str(MODELS[0]), "--out", str(tmp_path), "--backend", anyio_backend),
        *("--steps", "2", "--groups", "2", "--group-size", "2", "--max-tokens", "16"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `scorers`
    done = await anyio.run_process(command, check=False, stderr=None, env=environment)
    said = done.stdout.decode()
    print(said)
    assert done.returncode == 0
    assert len(re.findall(r"^step \d: reward .*update \d", said, re.MULTILINE)) == 2
