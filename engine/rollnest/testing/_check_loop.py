"""Drives an agent loop through everything that can interrupt it, at every scheduler step, and compares its samples."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from anyio import CancelScope, Event, create_task_group, fail_after
from attrs import evolve, field, frozen

from rollnest._attempt import Attempt
from rollnest._checks import check_whole
from rollnest._engine import Engine
from rollnest._loops import AgentLoop, LoopFunction
from rollnest._options import Limits, Sampling
from rollnest._records import Group, Prompt, Sample, Status
from rollnest._statistics import EngineStatistics
from rollnest._task import PromptLike, TaskSpec
from rollnest.abc import JudgerLike, PauseMode, Tokenizer
from rollnest.errors import EndOfPrompts

from ._check import check_sample
from ._conserved import assert_conserved
from ._recording import RecordingInstrument
from ._scripted import Reply, Script, ScriptedController
from ._steps import StepReport, act_at_steps, cancel_at_step

__all__ = ["LoopReport", "PlayedTask", "check_loop"]

Backend: TypeAlias = Literal["asyncio", "trio"]

_RATE = 10.0  # tokens per virtual second
_LONG = 1e6  # virtual seconds: whatever takes that long never ends
_SHORT = Sampling(6)
_LIMITS = Limits()
_PROMPTS = (Prompt("check", token_ids=[1, 2, 3]),)


@frozen(kw_only=True)
class LoopReport:
    """What `check_loop` did.

    Attributes:
        steps: Scheduler steps of an uninterrupted run, by backend.
        runs: Runs of the loop's task, uninterrupted ones included.
        paused: Runs that were paused, by mode; those that had ended before their step are not counted.
        cancelled: Runs that were cancelled.
        evicted: Times that a group was evicted and went on.
        restored: Runs that were saved, ended there, and went on in another engine.
        replayed_turns: Turns that were given again from journals.
        resumed_turns: Turns that went on from a partial.
        tool_calls: Calls of tools in an uninterrupted run.
    """

    steps: Mapping[str, int]
    runs: int
    paused: Mapping[PauseMode, int]
    cancelled: int
    evicted: int
    restored: int
    replayed_turns: int
    resumed_turns: int
    tool_calls: int


def check_loop(
    loop: AgentLoop | LoopFunction,
    prompts: Sequence[PromptLike] = _PROMPTS,
    *,
    judger: JudgerLike | None = None,
    script: Script | None = None,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling = _SHORT,
    max_response_tokens: int | None = None,
    group_size: int = 1,
    limits: Limits = _LIMITS,
    backends: Sequence[Backend] | None = None,
    modes: Sequence[PauseMode] = tuple(PauseMode),
    every: int = 1,
) -> LoopReport:
    """Checks that an agent loop survives whatever an engine does to it, at whatever moment.

    A small task with the loop runs under virtual time, against a `ScriptedController` that sends its answers token by
    token. It runs without interruption first; then once for every scheduler step and each pause mode, paused at that
    step, and evicted a second time soon after where the mode is `EVICT`; then once for every step, saved and ended at
    it, and gone on with in another engine; then once for every step, cancelled at it.

    Each run that was not cancelled must end with the same samples as the uninterrupted one, whatever was aborted, went
    on, was restored and replayed in between: the same tokens, verdicts and outcomes. Every sample passes
    `check_sample`, every token is accounted for, no tool runs again that has ended, and no task or thread is left.

    A loop passes if what it does follows from what its rollout gave it: turns, results of `rollout.tool`, draws from
    `rollout.random`. One that reads a clock, the `random` module or a variable that outlives it does not.

    Args:
        loop: The loop.
        prompts: What it is run on; one prompt of three ids by default. A few are enough.
        judger: Judges its samples.
        script: Answers a turn, by what the attempt holds and by nothing else: it is asked anew in every run. A turn
            that goes on from a partial gets the rest of its answer by itself. `None` makes tokens up.
        tokenizer: The engine's tokenizer.
        sampling: How turns are sampled. Short turns keep it quick: each token is a step or more.
        max_response_tokens: As in `TaskSpec`.
        group_size: As in `TaskSpec`.
        limits: As in `TaskSpec`.
        backends: Event loops to run on; `None` is asyncio, and trio where it is installed.
        modes: Pause modes.
        every: Try each n-th step only.

    Returns:
        Counts of what was done.

    Raises:
        AssertionError: Something does not hold; says at which step of what, and how the samples differ.
        ValueError: `every` is below 1, or the task can't be made of the other options.
        RuntimeError: An event loop runs in this thread already.
    """
    check_whole("every", every, 1)
    task = TaskSpec(
        "check_loop",
        prompts,
        judger=judger,
        loop=loop,
        group_size=group_size,
        epochs=1,
        shuffle=False,
        sampling=sampling,
        max_response_tokens=max_response_tokens,
        starve_after=len(prompts) + 1,
        limits=limits,
    )
    has_trio = importlib.util.find_spec("trio") is not None
    installed: Sequence[Backend] = ("asyncio", "trio") if has_trio else ("asyncio",)
    check = _Check(task, script, tokenizer)
    for backend in installed if backends is None else backends:
        check.uninterrupted(backend)
        for mode in modes:
            check.paused(backend, mode, every)
        check.restored(backend, every)
        check.cancelled(backend, every)
    return check.report()


@frozen(order=True)
class _Told:
    """What of a sample must be the same in every run."""

    uid: str
    index: int
    status: str
    finish_reason: str | None
    segments: tuple[Any, ...]
    score: float | None
    failed_at: str | None

    @classmethod
    def of(cls, sample: Sample) -> _Told:
        # Concurrent parts of a loop may open their contexts in any order.
        segments = sorted(
            (
                segment.prompt_ids.tolist(),
                segment.ids.tolist(),
                segment.mask.tolist(),
                segment.logprobs.tolist(),
                segment.versions.tolist(),
                [
                    (turn.start, turn.stop, turn.finish_reason, turn.text or "")
                    for turn in sample.turns
                    if turn.segment == number
                ],
            )
            for number, segment in enumerate(sample.segments)
        )
        # And which of their turns is the last to end is chance.
        is_a_turns = sample.finish_reason in {turn.finish_reason for turn in sample.turns}
        return cls(
            sample.prompt.uid,
            sample.index,
            sample.status.name,
            None if is_a_turns and len(segments) > 1 else sample.finish_reason,
            tuple(segments),
            sample.reward,
            None if sample.failure is None else sample.failure.kind,
        )


class _Tools(RecordingInstrument):
    """Counts the calls of tools that have ended, by rollout and name."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: Counter[tuple[str, str]] = Counter()

    def tool_ended(self, key: str, name: str, again: bool) -> None:
        """Counts it."""
        if not again:
            self.ended[key.rpartition("/")[0], name] += 1


@frozen
class _Outcome:
    """What came out of one run."""

    told: tuple[_Told, ...]
    tools: Mapping[tuple[str, str], int]
    statistics: EngineStatistics = field(eq=False)


@frozen
class Saved:
    """A run that was saved, and what it had done by then."""

    state: Mapping[str, bytearray]
    committed: int
    tools: Mapping[tuple[str, str], int]
    groups: Sequence[tuple[Group, str]]


class PlayedTask:
    """One run of a task to its end, under interruptions."""

    def __init__(
        self,
        task: TaskSpec,
        script: Script | None = None,
        tokenizer: Tokenizer | None = None,
        after: Saved | None = None,
    ) -> None:
        self.script = script
        self.controller = ScriptedController(script, rate=_RATE, stream=True)
        self.tools = _Tools()
        self.engine = Engine(self.controller, task, tokenizer=tokenizer, instruments=[self.tools])
        self._committed_before = 0
        if after is not None:
            self.engine.load_state_dict(after.state)
            self._committed_before = after.committed
            self.tools.ended.update(after.tools)
            self.tools.groups.extend(after.groups)
        self.entered = False
        self._groups = len(task.prompts) if isinstance(task.prompts, Sequence) else 1

    async def play(self, *interruptions: tuple[Event, PauseMode]) -> None:
        """Runs the task to its end, and pauses it when the events are set."""
        with fail_after(_LONG):
            async with self.engine, create_task_group() as tasks:
                self.entered = True
                tasks.start_soon(self._pause, interruptions)
                try:
                    await self.engine.next_batch(self._groups, wait_in_pause=True)
                except EndOfPrompts:
                    pass  # every sample failed
                tasks.cancel_scope.cancel()

    def save(self) -> Saved | None:
        """Saves it as it is; `None` if it was not entered yet."""
        if not self.entered:
            return None
        return Saved(
            state=self.engine.state_dict(),
            committed=self._committed,
            tools=dict(self.tools.ended),
            groups=[
                (group, outcome) for group, outcome in self.tools.groups if outcome != "waiting"
            ],
        )

    @property
    def _committed(self) -> int:
        return self._committed_before + self.controller.committed

    async def _pause(self, interruptions: Sequence[tuple[Event, PauseMode]]) -> None:
        for event, mode in interruptions:
            await event.wait()
            async with self.engine.paused(mode):
                assert_conserved(self.engine, committed=self._committed)

    def check(self, report: StepReport) -> None:
        """Checks what must hold after every run."""
        assert report.tasks_left == 0, f"{report.tasks_left} tasks were left"
        assert not report.threads_left, f"threads were left: {report.threads_left}"
        assert not self.controller.open, "a request was left open"
        assert not self.controller.while_paused, "the policy sampled while it was paused"
        if self.entered:
            assert_conserved(self.engine, committed=self._committed)

    @property
    def outcome(self) -> _Outcome:
        """What must be the same in every run."""
        ended = [group for group, outcome in self.tools.groups if outcome != "waiting"]
        samples = [sample for group in ended for sample in group.samples]
        return _Outcome(
            tuple(sorted(_Told.of(sample) for sample in samples)),
            dict(self.tools.ended),
            self.engine.statistics(),
        )

    @property
    def samples(self) -> Iterator[Sample]:
        """Every sample that was frozen, those that were cut too."""
        for group, _ in self.tools.groups:
            yield from group.samples


class _Check:
    """All runs of one loop."""

    def __init__(self, task: TaskSpec, script: Script | None, tokenizer: Tokenizer | None) -> None:
        self._task = task
        self._script = script
        self._tokenizer = tokenizer
        self._expected: _Outcome | None = None
        self._steps: dict[str, int] = {}
        self._runs = 0
        self._paused: Counter[PauseMode] = Counter()
        self._cancelled = 0
        self._restored = 0
        self._figures: Counter[str] = Counter()

    def report(self) -> LoopReport:
        assert self._expected is not None
        return LoopReport(
            steps=dict(self._steps),
            runs=self._runs,
            paused=dict(self._paused),
            cancelled=self._cancelled,
            evicted=self._figures["redrawn"],
            restored=self._restored,
            replayed_turns=self._figures["replayed_turns"],
            resumed_turns=self._figures["resumed_turns"],
            tool_calls=sum(self._expected.tools.values()),
        )

    def uninterrupted(self, backend: Backend) -> None:
        for _ in range(2):
            where = f"an uninterrupted run on {backend}"
            run, report = self._play(where, backend, {})
            self._steps[backend] = report.steps
            if self._expected is None:
                self._expected = run.outcome
                failed = [t for t in self._expected.told if t.status != Status.COMPLETED.name]
                if len(failed) == len(self._expected.told):
                    raise AssertionError(f"{where}: no sample completed: {failed[0]}{_why(run)}")
            else:
                self._compare(
                    f"{where} after another: what the loop does follows from something else than its rollout",
                    run,
                )

    def paused(self, backend: Backend, mode: PauseMode, every: int) -> None:
        step = 1
        while True:
            first, second = step, step + 1 + step % 13
            times = [first, second] if mode is PauseMode.EVICT else [first]
            where = f"{mode.name} at step {' and '.join(map(str, times))} on {backend}"
            run, report = self._play(where, backend, dict.fromkeys(times, mode))
            if not report.acted:
                return
            statistics = run.engine.statistics()
            _hold(where, statistics.total("restarted") == 0, "a tool did not do the same again")
            has_diverged = statistics.total("diverged") > 0
            again = "the loop asked for something else when it ran again"
            self._compare(f"{where}: {again}" if has_diverged else where, run)
            _hold(where, not has_diverged, again)
            for name in ("redrawn", "replayed_turns", "resumed_turns"):
                self._figures[name] += statistics.total(name)
            self._paused[mode] += 1
            step += every

    def restored(self, backend: Backend, every: int) -> None:
        step = 1
        while True:
            where = f"saved and restored at step {step} on {backend}"
            saved, script, acted = self._save_at(where, backend, step)
            if not acted:
                return
            if saved is not None:
                run, _ = self._play(where, backend, {}, script, saved)
                statistics = run.engine.statistics()
                _hold(where, statistics.total("restarted") == 0, "a tool did not do the same again")
                has_diverged = statistics.total("diverged") > 0
                again = "the loop asked for something else when it ran again"
                self._compare(f"{where}: {again}" if has_diverged else where, run)
                _hold(where, not has_diverged, again)
                for name in ("replayed_turns", "resumed_turns"):
                    self._figures[name] += statistics.total(name)
                self._restored += 1
            step += every

    def _save_at(
        self, where: str, backend: Backend, step: int
    ) -> tuple[Saved | None, Script | None, bool]:
        """Runs until a step, saves there and ends; says whether it came so far."""
        run = self._run()
        saved: list[Saved | None] = []
        scopes: list[CancelScope] = []

        async def operation() -> None:
            with CancelScope() as scope:
                scopes.append(scope)
                await run.play()

        def save_and_end() -> None:
            saved.append(run.save())
            scopes[0].cancel()

        try:
            report = act_at_steps(operation, {step: save_and_end}, backend=backend)
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error
        return (saved[0] if saved else None), run.script, bool(report.acted)

    def cancelled(self, backend: Backend, every: int) -> None:
        step = 1
        while True:
            where = f"a cancellation at step {step} on {backend}"
            run = self._run()
            try:
                report = cancel_at_step(run.play, step, backend=backend)
                run.check(report)
                self._check_samples(run)
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error
            if not report.cancelled:
                return
            self._cancelled += 1
            step += every

    def _run(self, script: Script | None = None, after: Saved | None = None) -> PlayedTask:
        self._runs += 1
        if script is None and self._script is not None:
            script = _Continuing(self._script)
        return PlayedTask(self._task, script, self._tokenizer, after)

    def _play(
        self,
        where: str,
        backend: Backend,
        pauses: Mapping[int, PauseMode],
        script: Script | None = None,
        after: Saved | None = None,
    ) -> tuple[PlayedTask, StepReport]:
        run = self._run(script, after)
        events: dict[int, Event] = {}

        async def operation() -> None:
            events.update({step: Event() for step in pauses})
            await run.play(*[(events[step], mode) for step, mode in pauses.items()])

        def set_event(step: int) -> Callable[[], None]:
            return lambda: events[step].set()

        try:
            report = act_at_steps(
                operation, {step: set_event(step) for step in pauses}, backend=backend
            )
            run.check(report)
            self._check_samples(run)
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error
        return run, report

    def _check_samples(self, run: PlayedTask) -> None:
        for sample in run.samples:
            check_sample(sample, max_response_tokens=self._task.max_response_tokens)

    def _compare(self, where: str, run: PlayedTask) -> None:
        assert self._expected is not None
        expected, got = self._expected, run.outcome
        for want, have in zip(expected.told, got.told, strict=True):
            _hold(where, want == have, f"{_difference(want, have)}{_why(run)}")
        _hold(
            where,
            expected.tools == got.tools,
            f"tools ended {_times(got.tools)} times, not {_times(expected.tools)} times",
        )


class _Continuing:
    """Asks a script once for each turn, and gives the rest of its answer when a turn goes on from a partial."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers: dict[str, list[tuple[list[int], Reply]]] = {}

    def __call__(self, attempt: Attempt) -> Reply:
        asked = attempt.prompt_ids.tolist()
        answers = self._answers.setdefault(attempt.affinity, [])
        for before, reply in answers:
            begun = asked[len(before) :]
            answer = list(reply.ids)
            if asked[: len(before)] == before and begun == answer[: len(begun)] != answer:
                return self._timed(evolve(reply, ids=answer[len(begun) :]))
        reply = self._script(attempt)
        answers.append((asked, reply))
        return self._timed(reply)

    @staticmethod
    def _timed(reply: Reply) -> Reply:
        return reply if reply.delay else evolve(reply, delay=len(reply.ids) / _RATE)


def _difference(want: _Told, have: _Told) -> str:
    """Says where two samples differ first."""
    said = f"sample {have.index} of prompt {have.uid!r} differs from that of an uninterrupted run: "
    if len(want.segments) == len(have.segments):
        columns = ("prompt id", "id", "mask", "logprob", "version", "turn")
        for number, segments in enumerate(zip(want.segments, have.segments, strict=True)):
            for column, one, other in zip(columns, *segments, strict=True):
                for at, (token, got) in enumerate(zip(one, other, strict=False)):
                    if token != got:
                        return f"{said}{column} {at} of context {number} is {got}, not {token}"
                if len(one) != len(other):
                    return f"{said}context {number} has {len(other)}, not {len(one)} of {column}"
    for name in ("status", "failed_at", "finish_reason", "score", "segments"):
        one, other = getattr(want, name), getattr(have, name)
        if one != other:
            return f"{said}its {name} is {other!r}, not {one!r}"
    return f"{said}it is {have}, not {want}"


def _hold(where: str, holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"{where}: {what}")


def _times(tools: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{name} of {uid} {count}" for (uid, name), count in sorted(tools.items()))


def _why(run: PlayedTask) -> str:
    failures = [s.failure for group, _ in run.tools.groups for s in group.samples if s.failure]
    return f"\n{failures[0].traceback}" if failures else ""
