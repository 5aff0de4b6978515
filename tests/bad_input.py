"""The table of bad input: what is fed in, and what must come of it. The docs' page is made from it.

python -m tests.bad_input          # writes docs/bad-input.md
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
from attrs import frozen

from rollnest import (
    AsyncStrategy,
    Capabilities,
    Capacity,
    Engine,
    FailurePolicy,
    Limits,
    PauseMode,
    ProcessJudger,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    TaskSpec,
    Verdict,
)
from rollnest.errors import EndOfPrompts, UnsupportedSampling
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    VirtualEventLoop,
    assert_conserved,
    free_running_threads,
)
from rollnest_adapters import cli

PAGE = Path(__file__).parents[1] / "docs" / "bad-input.md"


@frozen
class Outcome:
    """What came of it: an error at construction or entry, or a sample's status and the table's books."""

    error: str = ""
    message: str = ""
    status: str = ""
    ledger: str = ""


@frozen
class Case:
    """One row: `named` must all stand in the message."""

    name: str
    run: Callable[[], Outcome]
    error: str = ""
    named: tuple[str, ...] = ()
    status: str = ""
    ledger: str = ""


def task(**options: Any) -> TaskSpec:
    defaults: dict[str, Any] = {
        "name": "task",
        "prompts": [Prompt("p", token_ids=[1, 2, 3])],
        "judger": None,
        "group_size": 1,
        "epochs": 1,
        "sampling": Sampling(4),
    }
    return TaskSpec(**(defaults | options))


def raising(build: Callable[[], object]) -> Callable[[], Outcome]:
    """A case that fails where something is built."""

    def run() -> Outcome:
        try:
            build()
        except (ValueError, TypeError) as error:
            return Outcome(type(error).__name__, str(error))
        return Outcome()

    return run


def entering(controller: ScriptedController, **options: Any) -> Callable[[], Outcome]:
    """A case that fails where the engine is entered."""

    async def enter() -> Outcome:
        try:
            async with Engine(controller, task(**options)):
                return Outcome()
        except UnsupportedSampling as error:
            return Outcome(type(error).__name__, str(error))

    return lambda: anyio.run(enter)


def evaluating(**options: Any) -> Callable[[], Outcome]:
    """A case that fails where an evaluation is asked for."""

    async def evaluate() -> Outcome:
        async with Engine(ScriptedController(), task()) as engine:
            try:
                await engine.evaluate(**({"task": "task"} | options))
            except (ValueError, TypeError) as error:
                return Outcome(type(error).__name__, str(error))
        return Outcome()

    return lambda: anyio.run(evaluate)


def producing(
    reply: Reply | None = None, *, release: threading.Event | None = None, **options: Any
) -> Callable[[], Outcome]:
    """A case that shows in a sample: its group is dropped, or delivered."""

    async def produce() -> Outcome:
        good = Reply([5, 0])
        controller = ScriptedController(lambda _: reply or good, vocab_size=100, max_context=16)
        recording = RecordingInstrument()
        with ExitStack() as stack:
            if release is not None:
                stack.enter_context(free_running_threads())
            async with Engine(controller, task(**options), instruments=[recording]) as engine:
                try:
                    await engine.next_batch(1)
                except EndOfPrompts:
                    pass  # its only group was dropped
                if release is not None:
                    release.set()
                    stack.close()  # the exit waits for the thread
        assert_conserved(engine, committed=controller.committed)
        (sample,) = recording.samples
        books = engine.statistics().tasks["task"]
        dropped = dict(books.dropped)
        ledger = f"dropped: {dropped}" if dropped else f"delivered: {books.delivered}"
        requests = len(controller.prompts)
        return Outcome(
            message="" if sample.failure is None else sample.failure.message,
            status=sample.status.name,
            ledger=f"{ledger}, {requests} request{'' if requests == 1 else 's'}",
        )

    return lambda: anyio.run(produce, backend_options={"loop_factory": VirtualEventLoop})


def flag(*arguments: str) -> Callable[[], Outcome]:
    """A case of the command line."""

    def run() -> Outcome:
        stderr = io.StringIO()
        try:
            with redirect_stderr(stderr):
                cli.main(list(arguments))
        except SystemExit as error:
            return Outcome(f"exit status {error.code}", stderr.getvalue().strip().splitlines()[-1])
        return Outcome()

    return run


async def generates_nothing(rollout: Rollout) -> None:
    pass


class AnswersLater:
    async def judge(self, sample: Sample) -> float:
        return 1.0

    def __repr__(self) -> str:
        return "AnswersLater()"


class HoldsLock:
    def judge(self, sample: Sample) -> float:
        return 1.0

    def __reduce__(self) -> str:
        raise TypeError("a lock can't be pickled")

    def __repr__(self) -> str:
        return "HoldsLock()"


def judging(answer: object) -> Callable[[Sample], object]:
    def judge(sample: Sample) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return judge


def blocking_judge(release: threading.Event) -> Callable[[Sample], float]:
    def judge(sample: Sample) -> float:
        release.wait()
        return 1.0

    return judge


def cases() -> list[Case]:
    """All rows."""
    release = threading.Event()
    few = Capabilities(vocab_size=100, max_context=50, sampling={"temperature"})
    dropped = "dropped: {{'{kind}': 1}}, {n} request{s}".format
    inference = dropped(kind="inference", n=1, s="")
    judged = dropped(kind="judge", n=1, s="")
    delivered = "delivered: 1, 1 request"
    return [
        Case(
            "prompt longer than the context",
            producing(prompts=[Prompt("long", token_ids=range(1, 18))]),
            named=("long", "17", "16"),
            status="FAILED",
            ledger=dropped(kind="data", n=0, s="s"),
        ),
        Case(
            "prompt with an id outside the vocabulary",
            producing(prompts=[Prompt("odd", token_ids=[1, 100])]),
            named=("odd", "100"),
            status="FAILED",
            ledger=dropped(kind="data", n=0, s="s"),
        ),
        Case(
            "messages without a tokenizer",
            raising(lambda: Engine(ScriptedController(), task(prompts=["hello"]))),
            "ValueError",
            ("tokenizer", "'0'", "'task'"),
        ),
        Case("no prompts", raising(lambda: task(prompts=[])), "ValueError", ("prompts", "empty")),
        Case("a prompt without content", raising(lambda: Prompt("p")), "ValueError", ("'p'",)),
        Case(
            "two prompts of one uid",
            raising(lambda: task(prompts=[Prompt("p", token_ids=[1]), Prompt("p", token_ids=[2])])),
            "ValueError",
            ("prompts", "'p'"),
        ),
        Case(
            "two tasks of one name",
            raising(lambda: Engine(ScriptedController(), [task(), task()])),
            "ValueError",
            ("tasks", "'task'"),
        ),
        Case("an empty task name", raising(lambda: task(name=" ")), "ValueError", ("name", "' '")),
        Case("a negative weight", raising(lambda: task(weight=-1)), "ValueError", ("weight", "-1")),
        Case(
            "every weight 0",
            raising(lambda: Engine(ScriptedController(), task(weight=0))),
            "ValueError",
            ("weight", "0"),
        ),
        Case(
            "group size 0", raising(lambda: task(group_size=0)), "ValueError", ("group_size", "0")
        ),
        Case(
            "fewer than no spare members",
            raising(lambda: task(redundancy=-1)),
            "ValueError",
            ("redundancy", "-1"),
        ),
        Case(
            "an unknown policy for dead members",
            raising(lambda: FailurePolicy(on_dead_member=cast("Any", "ignore"))),
            "ValueError",
            ("on_dead_member", "ignore"),
        ),
        Case(
            "a least group size where nothing shrinks",
            raising(lambda: FailurePolicy(min_members=2)),
            "ValueError",
            ("min_members", "2", "'drop'"),
        ),
        Case(
            "a least group size above the group's",
            raising(lambda: task(failures=FailurePolicy(on_dead_member="shrink", min_members=2))),
            "ValueError",
            ("min_members", "2", "group_size 1"),
        ),
        Case(
            "a refine that leaves nobody",
            producing(refine=lambda group: []),
            status="COMPLETED",
            ledger="dropped: {'filter': 1}, 1 request",
        ),
        Case(
            "batch size 0",
            raising(lambda: Engine(ScriptedController(), task(), batch_size=0)),
            "ValueError",
            ("batch_size", "0"),
        ),
        Case(
            "an evaluation of an unknown task",
            evaluating(task="tusk"),
            "ValueError",
            ("'tusk'", "'task'"),
        ),
        Case("an evaluation of no prompt", evaluating(limit=0), "ValueError", ("limit", "0")),
        Case(
            "an unknown way to meet an update",
            evaluating(on_update="drop"),
            "ValueError",
            ("on_update", "'drop'"),
        ),
        Case(
            "no time until a stall is told",
            raising(lambda: Engine(ScriptedController(), task(), stall_after=0)),
            "ValueError",
            ("stall_after", "0"),
        ),
        Case(
            "a judger for processes that can't be pickled",
            raising(lambda: ProcessJudger(HoldsLock())),
            "TypeError",
            ("judger of a ProcessJudger", "picklable", "HoldsLock()"),
        ),
        Case(
            "an async judger for processes",
            raising(lambda: ProcessJudger(AnswersLater())),
            "TypeError",
            ("judger of a ProcessJudger", "synchronous", "AnswersLater()"),
        ),
        Case(
            "no process for a judger",
            raising(lambda: ProcessJudger(AnswersLater(), workers=0)),
            "ValueError",
            ("workers", "0"),
        ),
        Case(
            "no time for an outage",
            raising(lambda: Engine(ScriptedController(), task(), outage=0)),
            "ValueError",
            ("outage", "0"),
        ),
        Case(
            "room for no group",
            raising(lambda: Capacity(groups=0)),
            "ValueError",
            ("groups", "0"),
        ),
        Case(
            "no batch size for a strategy that runs ahead",
            raising(lambda: Engine(ScriptedController(), task(strategy=AsyncStrategy()))),
            "ValueError",
            ("batch_size", "'task'"),
        ),
        Case(
            "a token lag below zero",
            raising(lambda: AsyncStrategy(max_token_lag=-1)),
            "ValueError",
            ("max_token_lag", "-1"),
        ),
        Case(
            "a start that is paused or not",
            raising(lambda: Engine(ScriptedController(), task(), start_paused="no")),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            "TypeError",
            ("start_paused", "'no'"),
        ),
        Case(
            "a server that can only freeze",
            raising(
                lambda: Capabilities(
                    vocab_size=10, max_context=10, pause_modes=frozenset({PauseMode.KEEP})
                )
            ),
            "ValueError",
            ("pause_modes", "ABORT", "KEEP"),
        ),
        Case(
            "memory that no server has",
            raising(
                lambda: Capabilities(vocab_size=10, max_context=10, release_tags={"gradients"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            ),
            "ValueError",
            ("release_tags", "gradients"),
        ),
        Case(
            "an unknown keyword",
            raising(lambda: task(group_sise=8)),
            "TypeError",
            ("group_sise",),
        ),
        Case("an unknown flag", flag("demo", "--stepz", "3"), "exit status 2", ("--stepz",)),
        Case("a flag's bad value", flag("demo", "--steps", "0"), "exit status 2", ("--steps", "0")),
        Case(
            "sampling that the controller can't honour",
            entering(ScriptedController(capabilities=few), sampling=Sampling(4, top_k=5)),
            "UnsupportedSampling",
            ("top_k=5",),
        ),
        Case(
            "greedy training",
            raising(lambda: task(sampling=Sampling(4, temperature=0))),
            "ValueError",
            ("temperature", "0"),
        ),
        Case(
            "a loop that returns without generating",
            producing(loop=generates_nothing),
            named=("without generating",),
            status="FAILED",
            ledger=dropped(kind="loop", n=0, s="s"),
        ),
        Case(
            "a judger that raises",
            producing(judger=judging(RuntimeError("no verdict"))),
            named=("RuntimeError", "no verdict"),
            status="FAILED",
            ledger=judged,
        ),
        *(
            Case(
                f"a judger that answers {name}",
                producing(judger=judging(answer)),
                named=("score", shown),
                status="FAILED",
                ledger=judged,
            )
            for name, answer, shown in (
                ("NaN", math.nan, "nan"),
                ("infinity", math.inf, "inf"),
                ("None", None, "None"),
                ("a string", "1.0", "'1.0'"),
                ("a mapping without score", {"reward": 1}, "reward"),
            )
        ),
        Case(
            "a judger that blocks",
            producing(judger=blocking_judge(release), release=release, limits=Limits(judge=30.0)),
            named=("30.0 s",),
            status="FAILED",
            ledger=judged,
        ),
        *(
            Case(
                f"a judger that answers {name}",
                producing(judger=judging(answer)),
                status="COMPLETED",
                ledger=delivered,
            )
            for name, answer in (
                ("a bool", True),
                ("an int", 1),
                ("a numpy scalar", np.float32(1)),
                ("a mapping with score", {"score": 1.0, "why": "right"}),
                ("a Verdict", Verdict(1.0)),
            )
        ),
        *(
            Case(name, producing(reply), named=named, status="FAILED", ledger=inference)
            for name, reply, named in (
                ("an empty reply", Reply([]), ("without a single token",)),
                ("misaligned logprobs", Reply([5, 6], logprobs=[-1.0]), ("2 ids", "1 logprobs")),
                ("a NaN logprob", Reply([5], logprobs=[math.nan]), ("logprobs[0]", "nan")),
                ("an id out of range", Reply([5, 100]), ("ids[1] = 100", "100")),
                ("an unknown finish reason", Reply([5], finish="weird"), ("'weird'",)),
                ("an echoed prompt that differs", Reply([5], echo=[1, 2]), ("echoed", "2 ids")),
                ("tokens of an older version", Reply([5], versions=[-3]), ("-3",)),
            )
        ),
    ]


def page(outcomes: list[tuple[Case, Outcome]]) -> str:
    """The docs' page."""
    lines = [
        "# Bad input",
        "",
        "What is fed in, and what comes of it. This page is made from `tests/bad_input.py`, which runs every row;",
        "the messages are those that were seen.",
        "",
        "Errors at construction or entry raise at once. What goes wrong with one sample fails that sample: its group",
        "is dropped and counted under the boundary that was crossed, and the run goes on.",
        "",
        "| case | error | message | sample | books |",
        "|---|---|---|---|---|",
    ]
    for case, outcome in outcomes:
        message = outcome.message.replace("|", "\\|")
        cells = [case.name, outcome.error, message, outcome.status, outcome.ledger]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([(case, case.run()) for case in cases()]), encoding="utf-8")
