"""The reference model of the state machine: what a run must look like, kept apart from the engine.

Three parts see the run from outside: a scripted server that writes down every request and every token, agent loops
that write down what they asked for and what they appended, and an instrument. From these notes the model says what
each request must hold (I4, I5), what each frozen sample must hold (I1 to I3, I11), and where each group visit must
stand (I7, I8, I9). Nothing raises here, because the engine would take it for a failed sample: what is wrong is
noted in `World.faults`, and the machine raises it after the step.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any, Literal, TypeAlias, cast

from anyio import (
    create_task_group,
    current_time,
    get_cancelled_exc_class,
    move_on_after,
    sleep,
    sleep_forever,
)
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field, frozen

from rollnest import (
    Batch,
    Capacity,
    Context,
    EvalResult,
    FailurePolicy,
    Group,
    Limits,
    ProduceStrategy,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    SyncStrategy,
    TaskSpec,
    Turn,
)
from rollnest._attempt import PROBE
from rollnest.abc import Attempt, FinishReason, Instrument, PauseMode, WeightSource
from rollnest.errors import InferenceError, LoopError, ToolError
from rollnest.testing import (
    Reply,
    ScriptedController,
    check_sample,
    expected_logprob,
)

from .helpers import cancel_nobody

__all__ = ["CALM", "FAULTS", "Mood", "Plan", "Server", "Watcher", "World"]

VOCABULARY = 1000
STOP_ID = 0
_TICK = 1e-3
CONTEXT = 48  # of the server, in tokens

Kind = Literal["one", "turns", "fork", "tools", "threads", "hasty", "stubborn", "odd"]


@frozen
class Plan:
    """One task of a run, as drawn."""

    loops: tuple[Kind, ...] = ("one",)
    judger: Literal["async", "sync", "none"] = "async"
    group_size: int = 2
    strategy: ProduceStrategy = field(factory=SyncStrategy)
    weight: float = 1.0
    epochs: int | None = None
    prompts: int = 4
    max_tokens: int = 6
    min_tokens: int = 0
    max_response_tokens: int | None = None
    max_context: int | None = None
    limits: Limits = field(factory=Limits)
    starve_after: int = 4
    redundancy: int = 0
    failures: FailurePolicy = field(factory=lambda: FailurePolicy(max_failures_in_a_row=None))

    @property
    def members(self) -> int:
        """How many members a group begins with."""
        return self.group_size + self.redundancy

    @property
    def partial(self) -> bool:
        """Whether a turn goes on from its partial."""
        return getattr(self.strategy, "partial", True)

    @property
    def token_lag(self) -> int | None:
        """Tokens that lag more are masked."""
        return getattr(self.strategy, "max_token_lag", None)

    @property
    def least(self) -> int:
        """Fewest tokens of a turn that may stop."""
        return min(self.min_tokens, self.max_tokens)


@frozen(kw_only=True)
class Mood:
    """How the server and the judgers behave now; steps change one thing at a time."""

    per_token: float = 0.1  # seconds
    stream: bool = False
    labelled: bool = True  # whether tokens come with their version
    admission: float = 0.0
    linger: float = 0.0  # seconds from an answer's end until its connection is closed
    deaf: int = 0
    abort: float | None = 0.0  # seconds that it takes, or None: it fails
    fault: str | None = None  # what is wrong with some answers
    often: float = 0.5  # how many of them
    down: bool = False  # whether it refuses everything
    pause: Literal["ok", "slow", "hangs", "fails"] = "ok"
    judge: Literal["ok", "slow", "slower", "fails", "quits", "nan", "none", "text"] = "ok"


CALM = Mood()

FAULTS = (
    "error",
    "crash",
    "misaligned",
    "nan",
    "positive",
    "empty",
    "cut",
    "unknown finish",
    "echo",
    "vocabulary",
    "newer",
    "older",
    "overrun",
    "mute",
)
"""What can be wrong with an answer; `"cut"` is none, the server may end a turn early unasked."""


@define(eq=False)
class Request:
    """One request, as the server saw it; stands in for the attempt at the scripted server."""

    attempt: Attempt
    world: World
    prompt: list[int]
    labelled: bool
    ids: list[int] = field(factory=list[int])
    logprobs: list[float] = field(factory=list[float])
    versions: list[int] = field(factory=list[int])
    reason: str | None = None
    over: bool = False
    ended: float = 0.0
    may_pass: bool = False  # whether it failed for a reason that may pass
    spent: float = 0.0  # seconds at the server, with the gate open

    def commit(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: int | Sequence[int] | None = None,
    ) -> int:
        """Hands tokens on, and writes down those that were taken."""
        world = self.world
        as_said = versions if self.labelled or not isinstance(versions, int) else None
        count = self.attempt.commit(ids, logprobs, as_said)
        world.committed += count
        if count and world.block_on:
            world.fault(f"I10: {count} tokens were committed inside a paused() block")
        if count and self.over:
            world.fault(f"I10: {count} tokens were taken of a request that is over")
        self.ids += ids[:count]
        self.logprobs += logprobs[:count]
        # An answer that stood still in a pause says itself which weights made which part of it.
        said = None if isinstance(versions, int) else versions
        self.versions += [world.version] * count if said is None else list(said)[:count]
        if len(self.ids) > self.attempt.max_tokens:
            world.fault(f"I5: {len(self.ids)} tokens of {self.attempt.max_tokens} were taken")
        return count

    def finish(self, reason: FinishReason | str, detail: str | None = None) -> None:
        """Hands the end on, and writes it down."""
        self.attempt.finish(reason, detail)
        self.reason = str(reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attempt, name)


@frozen(eq=False)
class Done:
    """One turn that brought tokens, as a journal must hold it."""

    start: int
    stop: int
    max_tokens: int | None
    reason: str | None  # `None` if it was cut


Columns: TypeAlias = "tuple[list[int], list[int], list[float], list[int]]"
"""Ids, origin, logprobs, versions."""


@define(eq=False)
class Record:
    """What a context must be given again when its loop runs again."""

    prompt: list[int]
    columns: Columns
    turns: list[Done]
    at: int = 0  # up to here it was given again

    @property
    def end(self) -> int:
        """Where its last turn ends."""
        return self.turns[-1].stop if self.turns else self.at

    def part(self, start: int, stop: int) -> Columns:
        """Some of the columns."""
        ids, origin, logprobs, versions = self.columns
        return ids[start:stop], origin[start:stop], logprobs[start:stop], versions[start:stop]


@define(eq=False)
class Asked:
    """One turn that a loop asked for."""

    base: list[int]  # what the context held
    cap: int
    partial: bool
    prior: list[int] = field(factory=list[int])  # what is given again
    given: Done | None = None
    max_tokens: int | None = None  # what the loop said
    requests: list[Request] = field(factory=list[Request])

    @property
    def kept(self) -> list[Request]:
        """Requests whose tokens count."""
        return self.requests if self.partial else self.requests[-1:]

    @property
    def got(self) -> list[int]:
        """What came of it so far."""
        return self.prior + [token for request in self.kept for token in request.ids]


@define(eq=False)
class Strand:
    """One token context of a rollout, as it must be."""

    prompt: list[int]
    source: Rollout | Context
    record: Record | None = None
    ids: list[int] = field(factory=list[int])
    origin: list[int] = field(factory=list[int])
    logprobs: list[float] = field(factory=list[float])
    versions: list[int] = field(factory=list[int])
    turns: list[Done] = field(factory=list[Done])
    asked: Asked | None = None

    @property
    def spoken_for(self) -> int:
        """Tokens that it has, or that its running turn may bring."""
        running = 0 if self.asked is None else len(self.asked.base) - len(self.prompt)
        return max(len(self.ids), running + (0 if self.asked is None else self.asked.cap))

    @property
    def promised(self) -> int:
        """These, or what it is to be given again."""
        return max(self.spoken_for, 0 if self.record is None else self.record.end)

    def take(self, columns: Columns) -> None:
        """Takes over what was recorded."""
        self.ids += columns[0]
        self.origin += columns[1]
        self.logprobs += columns[2]
        self.versions += columns[3]

    def keep(self, requests: Sequence[Request]) -> None:
        """Takes over what requests brought."""
        for request in requests:
            count = len(request.ids)
            self.take((request.ids, [1] * count, request.logprobs, request.versions))

    def next(self, max_tokens: int | None) -> Done | None:
        """The recorded turn that must be given again, if the loop asks for it."""
        record = self.record
        if record is None or not record.turns:
            return None
        turn = record.turns[0]
        same = turn.max_tokens == max_tokens and self.ids == record.columns[0][: turn.start]
        if same and not any(self.origin[record.at :]):
            return turn
        self.record = None  # the loop went another way
        return None

    def rewind(self) -> None:
        """Takes over what it was not given again: the rollout is cut once more."""
        record, self.record = self.record, None
        if record is not None and record.turns:
            ids, origin, logprobs, versions = record.part(0, record.end)
            self.ids, self.origin, self.logprobs, self.versions = ids, origin, logprobs, versions
            self.turns += record.turns

    def columns(self, *, trim: bool) -> Columns:
        """The columns that its segment must have."""
        length = len(self.ids)
        while trim and length and not self.origin[length - 1]:
            length -= 1
        return (
            self.ids[:length],
            self.origin[:length],
            array("f", self.logprobs[:length]).tolist(),
            self.versions[:length],
        )


class Track:
    """One rollout in one run: the loop goes through it, so that everything the loop does is written down.

    Args:
        world: Where it is.
        plan: Its task.
        rollout: The rollout.
        before: The run that was cut, if this one goes on from there.
    """

    def __init__(
        self, world: World, plan: Plan, rollout: Rollout, before: Track | None = None
    ) -> None:
        self.world = world
        self.plan = plan
        self.rollout = rollout
        self.where = "loop"
        self.outcome = ""
        self.quits = False  # whether it cancels itself
        self.judged: float | str | None = None
        self.cut = False
        self.failed_itself = False
        self.unsure = False  # whether nobody outside can tell what must have been kept
        self.segments = 0
        self.run = 0
        self.life = 0
        self.tools: list[str] = []  # how those ended that did
        self.recorded_tools: list[str] = []
        self.unopened: list[Record] = []
        if before is not None:
            self.life = before.life
            self.unsure = before.unsure
            self.recorded_tools = before.tools
            self.unopened = [
                Record(s.prompt, s.columns(trim=False), list(s.turns))
                for s in before.strands
                if s.turns
            ]
        prompt = list(rollout.prompt.token_ids or ())
        self.main = Strand(prompt, rollout, self._record(prompt))
        self.strands: list[Strand] = [self.main]

    def _record(self, prompt: list[int]) -> Record | None:
        for record in self.unopened:
            if record.prompt == prompt:
                self.unopened.remove(record)
                return record
        return None

    def rewind(self) -> None:
        """Takes over what was not given again: the rollout was cut."""
        for strand in self.strands:
            strand.rewind()
        for record in self.unopened:
            strand = Strand(record.prompt, self.rollout, record)
            strand.rewind()
            self.strands.append(strand)
        self.unopened = []
        self.tools += self.recorded_tools[len(self.tools) :]

    def remaining(self, strand: Strand) -> int:
        """What the strand may still take (I5)."""
        room = self.world.max_context(self.plan) - len(strand.prompt) - len(strand.ids)
        if self.plan.max_response_tokens is not None:
            used = sum(s.spoken_for for s in self.strands)
            room = min(room, self.plan.max_response_tokens - used)
        return max(0, room)

    def room(self, strand: Strand) -> int:
        """This, without what other contexts are to be given again."""
        room, most = self.remaining(strand), self.plan.max_response_tokens
        if most is None:
            return room
        others = sum(s.promised for s in self.strands if s is not strand)
        others += sum(record.end for record in self.unopened)
        return max(0, min(room, most - others - len(strand.ids)))

    def segment(self) -> Strand:
        """Opens another context; its first id names it."""
        self.segments += 1
        prompt = [500 + self.segments, 3]
        strand = Strand(prompt, self.rollout.segment(prompt), self._record(prompt))
        self.strands.append(strand)
        return strand

    def append(self, strand: Strand, ids: list[int]) -> None:
        """Appends context."""
        room = self.remaining(strand)
        if strand.source.remaining != room and not self.unsure:
            self.world.fault(f"I5: {strand.source.remaining} tokens remain, not {room}")
        room = self.room(strand)
        strand.source.append(ids)
        fits = ids[:room]
        self.cut = self.cut or len(ids) > room
        strand.take((fits, [0] * len(fits), [0.0] * len(fits), [-1] * len(fits)))

    async def generate(self, strand: Strand, max_tokens: int | None = None) -> Turn:
        """Asks for a turn, and compares what comes with what the server sent, or what is on record."""
        world, start = self.world, len(strand.ids)
        cap = min(max_tokens or self.plan.max_tokens, self.room(strand))
        asked = Asked(strand.prompt + strand.ids, cap, self.plan.partial, max_tokens=max_tokens)
        asked.given = given = strand.next(max_tokens)
        record = strand.record
        if given is not None and record is not None and (given.reason or self.plan.partial):
            asked.prior = record.columns[0][given.start : given.stop]
        strand.asked = asked
        self.where = "turn"
        keep: Sequence[Request] = asked.kept
        began, taken = current_time(), given is not None
        reason: str | None = None
        try:
            turn = await strand.source.generate(max_tokens=max_tokens)
        except InferenceError as error:
            self._check_limit(asked, over="took over" in str(error))
            keep = self._kept_of_a_failure(asked)
            raise
        except LoopError:
            if asked.requests:
                world.fault("a refused turn sent a request")
            raise
        except BaseException:
            keep = self._kept_of_a_cut(asked)
            # What is on record is given after a checkpoint, and then the turn waits for its place.
            taken = bool(asked.requests)
            if given is not None and not given.reason and not taken:
                taken = current_time() > began
                self.unsure = self.unsure or not taken  # it may have come as far as that, or not
            raise
        else:
            keep = asked.kept
            if not cap:
                self.cut = True
            self._check_limit(asked, over=False)
            self._compare(asked, turn)
            reason = turn.finish_reason
            return turn
        finally:
            strand.asked = None
            if given is not None and record is not None and taken:
                record.turns.pop(0)
                record.at = given.stop if asked.prior else given.start
                if asked.prior:
                    strand.take(record.part(given.start, given.stop))
                else:
                    record.turns.clear()
            strand.keep(keep)
            if len(strand.ids) > start:
                reason = reason or self.said(keep, strand.ids[start:])
                strand.turns.append(Done(start, len(strand.ids), max_tokens, reason))
            self.where = "loop"

    def _kept_of_a_failure(self, asked: Asked) -> Sequence[Request]:
        """Tokens of requests that failed for good are not used, those of others were checked when they came."""
        last = asked.requests[-1:]
        if not asked.partial:
            return ()
        return asked.requests if last and last[0].may_pass else asked.requests[:-1]

    def _kept_of_a_cut(self, asked: Asked) -> Sequence[Request]:
        """A request that is cancelled keeps its partial; one that was over is discarded with `partial=False`."""
        if asked.partial or not asked.requests:
            return asked.requests
        last = asked.requests[-1]
        at_once = last.over and last.ended == current_time()
        if at_once and (self.world.gate_closed or last.reason is not None or last.may_pass):
            self.unsure = True
        return [last] if at_once else ()

    def said(self, kept: Sequence[Request], got: Sequence[int]) -> str | None:
        """Whether what was kept of a turn that was cut says that it had ended."""
        if not kept:
            return None
        if kept[-1].reason in ("stop", "length"):
            return kept[-1].reason
        return "stop" if got[-1] == STOP_ID and len(got) >= self.plan.least else None

    def _check_limit(self, asked: Asked, *, over: bool) -> None:
        """Limits stop while the gate is closed, and while a turn waits for it."""
        limit = self.plan.limits.turn
        spent = sum(request.spent for request in asked.requests)
        if not over and self.world.had_failures():
            return  # it may have been barred for some of the time, which does not count
        if limit is not None and not (spent >= limit - _TICK if over else spent <= limit + _TICK):
            self.world.fault(f"limits: a turn of {spent} s, over {limit} s: {over}")

    def _compare(self, asked: Asked, turn: Turn) -> None:
        world, got = self.world, asked.got
        if self.unsure:
            return
        if asked.given is not None and asked.given.reason is not None:
            world.fired["replay: a turn is given again"] += 1
            if asked.requests:
                world.fault("I4: a turn that is on record was asked for again")
            if turn.ids.tolist() != got or turn.finish_reason != asked.given.reason:
                world.fault(f"I4: {turn} was given again, {got} are on record")
            return
        if asked.given is not None:
            world.fired["replay: a turn goes on"] += 1
        if turn.ids.tolist() != got:
            world.fault(f"I4: the turn has {turn.ids.tolist()}, the server sent {got}")
        if asked.requests and not got:
            world.fault("I11: a turn without a token was taken for an answer")
        if turn.attempts != len(asked.requests) and asked.given is None:
            world.fault(f"the turn took {len(asked.requests)} requests, not {turn.attempts}")
        if len(got) > asked.cap:
            world.fault(f"I5: a turn of {len(got)} tokens, its cap was {asked.cap}")
        if not asked.requests:
            expected = "length"
            if len(got) < asked.cap:
                world.fault("I7: a turn ended with a partial that was to go on")
        elif (last := asked.requests[-1].reason) in ("stop", "length"):
            expected = str(last)
        else:
            stopped = bool(got) and got[-1] == STOP_ID and len(got) >= self.plan.least
            expected = "stop" if stopped else "length"
            if not stopped and len(got) < asked.cap:
                world.fault("I7: a turn ended with a partial that was to go on")
        if turn.finish_reason != expected:
            world.fault(f"I5: a turn ended as {turn.finish_reason}, not {expected}")

    async def tool(self, seconds: float, *, fails: bool = False, thread: bool = False) -> None:
        """Calls a tool."""
        world = self.world

        began = False

        async def work() -> None:
            nonlocal began
            began = True
            with world.counted("tools"):
                await sleep(seconds)
                if fails:
                    raise ValueError("the tool is broken")

        def work_in_thread() -> None:
            nonlocal began
            began = True
            if fails:
                raise ValueError("the tool is broken")

        number, outcome = len(self.tools), ""
        self.where = "tool"
        try:
            if thread:
                await self.rollout.tool(work_in_thread)
            else:
                await self.rollout.tool(work)
            outcome = "returned"
        except ToolError:
            outcome = "raised"
            raise
        finally:
            self.where = "loop"
            if outcome:
                self.tools.append(outcome)
            if self.recorded_tools[number:] and not self.unsure:
                world.fired["replay: a tool is not called again"] += 1
                if began:
                    world.fault(f"{self.rollout.uid} called a tool again that is on record")
                if outcome and outcome != self.recorded_tools[number]:
                    world.fault(f"a tool that {self.recorded_tools[number]} has now {outcome}")


async def _play(track: Track, kind: Kind, random: Random) -> None:
    """Plays one agent loop."""
    rollout, main = track.rollout, track.main
    match kind:
        case "one":
            await track.generate(main)
        case "turns":
            for _ in range(random.randint(1, 4)):
                await track.generate(main, random.choice([None, 1, 3]))
                if rollout.done:
                    return
                track.append(main, [random.randrange(1, 500) for _ in range(random.randint(0, 4))])
                if rollout.done:
                    return
        case "fork":
            if random.random() < 0.5:
                await track.generate(main)
            strands = [track.segment(), track.segment()]
            async with create_task_group() as group:
                for strand in strands:
                    group.start_soon(track.generate, strand)
            if not rollout.done:
                track.append(strands[0], [7, 8])
                if random.random() < 0.5 and not rollout.done:
                    await track.generate(strands[0])
        case "tools" | "threads":
            await track.generate(main, 2)
            try:
                await track.tool(
                    random.choice([0.0, 0.2, 1.0, 8.0]),
                    fails=random.random() < 0.2,
                    thread=kind == "threads",
                )
            except ToolError:
                if random.random() < 0.3:
                    raise
            if not rollout.done:
                track.append(main, [9, 9])
                if not rollout.done:
                    await track.generate(main)
        case "hasty":
            with move_on_after(random.choice([0.0, 0.15, 0.4, 1.0])):
                await track.generate(main)
            if not rollout.done:
                await track.generate(main)
        case "stubborn":
            for _ in range(3):
                try:
                    await track.generate(main)
                    break
                except InferenceError:
                    if rollout.done:
                        raise
        case "odd":
            await _play_odd(track, random)


async def _play_odd(track: Track, random: Random) -> None:
    rollout, main = track.rollout, track.main
    match random.randrange(8):
        case 0:
            raise ValueError("the loop is broken")
        case 1:
            await track.generate(main)
            raise KeyError("the loop is broken late")
        case 2:
            await track.generate(main)
            track.failed_itself = True
            rollout.fail("no good")
        case 3:
            await track.generate(main)
            rollout.finish("enough")
            await track.generate(main)  # refused
        case 4:
            await checkpoint()
        case 5:
            await track.generate(main)
            rollout.finish("enough")
        case 6:
            await track.generate(main)
            track.quits = True
            track.world.fired["the loop: quits"] += 1
            await cancel_nobody()
        case _:
            await sleep(random.choice([0.5, 20.0]))
            await track.generate(main)


@define(eq=False)
class Visit:
    """One group visit, as events told it."""

    state: Literal["flight", "ready", "waiting", "dropped", "delivered"] = "flight"
    group: Group | None = None
    runs: int = 1
    fresh: dict[int, Sample] = field(factory=dict[int, Sample])  # what a redraw has to keep
    unjudged: set[int] = field(factory=set[int])  # who lacks a verdict only
    judging: set[int] = field(factory=set[int])  # of these, who was not asked about yet
    resumed: set[int] = field(factory=set[int])  # who goes on from what is on record


class World:
    """Everything that is known of a run without asking the engine."""

    def __init__(
        self, plans: dict[str, Plan], capacity: Capacity, seed: int, fired: Counter[str]
    ) -> None:
        self.plans = plans
        self.capacity = capacity
        self.seed = seed
        self.fired = fired
        self.mood = CALM
        self.faults: list[str] = []
        self.version = 0  # the server's
        self.published: int | None = None  # the version before an update that goes on
        self.committed = 0
        self.by_hand = 0  # of these, tokens that did not come through the script
        self.gate_closed = False
        self.evicting = False
        self.evicted: set[tuple[str, int]] = set()  # groups that an eviction may have cancelled
        self.on_closed: Callable[[], None] = lambda: None
        self.had_failures: Callable[[], bool] = lambda: False
        self.closed_since = 0.0
        self.closed_seconds = 0.0
        self.lives: Counter[tuple[str, int, int]] = Counter()
        self.block_on = False
        self.leaving = False
        self.tracks: dict[tuple[str, int, int], Track] = {}
        self.requests: list[Request] = []
        self.now: Counter[str] = Counter()
        self.visits: dict[str, dict[int, Visit]] = {name: {} for name in plans}
        self.restarts: Counter[str] = Counter()
        self.dropped: dict[str, Counter[str]] = {name: Counter() for name in plans}
        self.ended: list[tuple[Group, str, list[Track | None], bool]] = []
        self.batches: list[Batch] = []
        self.trained: set[int] = set()  # batches that are committed
        self.keeps_batches = False  # whether only a commit lets a batch go
        self.again: list[Batch] = []  # those that a restored engine has to hand over again
        self.restored = False  # whether the engine was restored
        self.entering = False  # whether it is just being entered
        self.evaluations = 0

    def fault(self, message: str) -> None:
        """Notes that something is wrong."""
        self.faults.append(message)

    @property
    def in_flight(self) -> set[tuple[str, int]]:
        """Groups that have begun and not ended."""
        return {
            (task, number)
            for task, visits in self.visits.items()
            for number, visit in visits.items()
            if visit.state == "flight"
        }

    def open_seconds(self) -> float:
        """Time with the gate open so far, on a clock of its own."""
        now = self.closed_since if self.gate_closed else current_time()
        return now - self.closed_seconds

    def begin_evaluation(self, plan: Plan) -> TaskSpec:
        """Makes a task to evaluate, with a name of its own."""
        self.evaluations += 1
        name = f"e{self.evaluations}"
        self.plans[name] = plan
        return self.spec(name)

    def evaluated(self, result: EvalResult, asked: int) -> None:
        """Compares an evaluation's result with what its loops did."""
        plan = self.plans[result.task]
        if len(result.groups) != asked:
            self.fault(f"an evaluation of {asked} prompts has {len(result.groups)}")
        for group in result.groups:
            if [s.index for s in group.samples] != list(range(plan.group_size)):
                self.fault(f"an evaluation's group has the members {group.samples}")
            for sample in group.samples:
                self._check_whole(sample, plan)
                track = self.tracks.get((group.task, group.visit, sample.index))
                if track is not None:
                    self._check_sample(sample, track)
                elif not self._leaves_no_room(sample):
                    self.fault(f"{sample.uid} never ran: {sample}")

    def max_context(self, plan: Plan) -> int:
        """Most tokens of a context."""
        return min(plan.max_context or CONTEXT, CONTEXT)

    @contextmanager
    def counted(self, what: Literal["turns", "judges", "tools"]) -> Generator[None]:
        """Counts what goes on at once, and compares with the bound."""
        self.now[what] += 1
        bound = getattr(self.capacity, what)
        if bound is not None and self.now[what] > bound:
            self.fault(f"capacity: {self.now[what]} {what} at once, the bound is {bound}")
        try:
            yield
        finally:
            self.now[what] -= 1

    # What a task is made of

    def spec(self, name: str) -> TaskSpec:
        """Makes the task of a plan."""
        plan = self.plans[name]
        lengths = [1, 2, 3]
        if plan.max_context is not None:
            lengths.append(plan.max_context)  # a prompt that leaves no room
        prompts = [
            Prompt(f"p{i}", token_ids=[1 + i, *[2] * (lengths[i % len(lengths)] - 1)])
            for i in range(plan.prompts)
        ]
        judgers: dict[str, Callable[[Sample], float | Awaitable[float]] | None] = {
            "async": self._judge,
            "sync": self._judge_in_thread,
            "none": None,
        }
        return TaskSpec(
            name,
            prompts,
            judger=judgers[plan.judger],
            loop=self._loop(plan),
            group_size=plan.group_size,
            redundancy=plan.redundancy,
            failures=plan.failures,
            epochs=plan.epochs,
            sampling=Sampling(plan.max_tokens, min_tokens=plan.least),
            max_response_tokens=plan.max_response_tokens,
            max_context=plan.max_context,
            strategy=plan.strategy,
            weight=plan.weight,
            starve_after=plan.starve_after,
            limits=plan.limits,
        )

    def _loop(self, plan: Plan) -> Callable[[Rollout], Awaitable[None]]:
        async def loop(rollout: Rollout) -> None:
            key = task, number, index = _key(rollout.uid)
            old = self.tracks.get(key)
            if old is not None and any(s.asked is not None for s in old.strands):
                self.fault(f"{rollout.uid} runs twice")
            visit = self.visits.get(task, {}).get(number, Visit())
            goes_on = index in visit.resumed and old is not None and old.run < visit.runs
            track = self.tracks[key] = Track(self, plan, rollout, old if goes_on else None)
            track.run = visit.runs
            if not goes_on:
                self.lives[key] += 1
                track.life = self.lives[key]
            random = Random(f"{self.seed}/{rollout.uid}/{track.life}")
            try:
                await _play(track, random.choice(plan.loops), random)
            except Exception as error:
                track.outcome = f"raised {type(error).__name__}"
                raise
            except BaseException:
                track.outcome = "quit" if track.quits else "cancelled"
                raise
            else:
                track.outcome = "returned"
            finally:
                track.where = ""

        return loop

    async def _judge(self, sample: Sample) -> float:
        track, mood = self._to_judge(sample), self.mood.judge
        track.where = "judge"
        try:
            with self.counted("judges"):
                await checkpoint()
                if mood in ("slow", "slower"):
                    await sleep(1.0 if mood == "slow" else 200.0)
                if mood == "quits":
                    self.fired["the judger: quits"] += 1
                    await cancel_nobody()
                return self._answer(track, sample, mood)
        except get_cancelled_exc_class():
            track.judged = "cancelled"
            raise
        finally:
            track.where = ""

    def _judge_in_thread(self, sample: Sample) -> float:
        return self._answer(self._to_judge(sample), sample, self.mood.judge)

    def _to_judge(self, sample: Sample) -> Track:
        if sample.status is not Status.COMPLETED or sample.verdict is not None:
            self.fault(f"I11: the judger was given {sample}")
        track = self.tracks[sample.task, sample.visit, sample.index]
        visit = self.visits.get(sample.task, {}).get(sample.visit)
        if visit is not None and sample.index in visit.judging:
            visit.judging.discard(sample.index)
            self.fired["judged after an eviction"] += 1
        elif track.judged is not None and not (
            track.judged in ("failed", "nan", "none", "text", "cancelled")
            and track.plan.failures.on_dead_member == "retry"
        ):
            self.fault(f"{track.rollout.uid} was judged twice")
        track.judged = "asked"
        return track

    def _answer(self, track: Track, sample: Sample, mood: str) -> float:
        self.fired[f"the judger: {mood}"] += 1
        answers: dict[str, object] = {"nan": float("nan"), "none": None, "text": "good"}
        if mood == "fails":
            track.judged = "failed"
            raise ValueError("the judger is broken")
        if mood in answers:
            track.judged = mood
            return cast("float", answers[mood])
        track.judged = float(sum(len(s.ids) for s in sample.segments) + sample.index)
        return track.judged

    # What a request must hold

    def arrived(self, attempt: Attempt) -> Request:
        """Compares a request with what the loop has asked for."""
        prompt = attempt.prompt_ids.tolist()
        request = Request(attempt, self, prompt, self.mood.labelled)
        self.requests.append(request)
        if self.gate_closed:
            self.fault("I10: a request was sent while the gate was closed")
        if attempt.version != self.version:
            self.fault(f"I3: a request of version {attempt.version}, the server has {self.version}")
        if attempt.affinity == PROBE:
            self.fired["the engine: a probe"] += 1
            if attempt.max_tokens != 1:
                self.fault(f"a probe of {attempt.max_tokens} tokens")
            return request
        track = self.tracks[_key(attempt.affinity)]
        strands = [s for s in track.strands if s.prompt[0] == prompt[0] and s.asked is not None]
        if len(strands) != 1 or strands[0].asked is None:
            self.fault(f"I4: nobody asked for a turn on {prompt}")
            return request
        asked = strands[0].asked
        got = asked.got if asked.partial else asked.prior
        if track.unsure:
            asked.requests.append(request)
            return request
        if asked.given is not None and asked.given.reason is not None:
            self.fault(f"I4: a turn on record was sent: {prompt}")
        if prompt != asked.base + got:
            self.fault(f"I4: {prompt} was sent, {asked.base} and {got} were there")
        if attempt.max_tokens != asked.cap - len(got) or attempt.max_tokens < 1:
            self.fault(f"I5: the cap was {attempt.max_tokens}, {len(got)} of {asked.cap} are there")
        for earlier in asked.requests:
            if earlier.reason not in (None, "abort"):
                self.fault(f"I4: a turn went on after it had ended as {earlier.reason}")
        asked.requests.append(request)
        return request

    # What the frozen ends must hold

    def check_ended(self) -> None:
        """Compares every group that has ended since the last call."""
        ended, self.ended = self.ended, []
        for group, outcome, tracks, cancelled in ended:
            self._check_group(group, outcome, cancelled=cancelled)
            for sample, track in zip(group.samples, tracks, strict=True):
                if track is not None:
                    self._check_sample(sample, track)
                elif sample.status is not Status.ABORTED and not self._leaves_no_room(sample):
                    self.fault(f"{sample.task}/{sample.visit}/{sample.index} never ran: {sample}")

    def _leaves_no_room(self, sample: Sample) -> bool:
        return sample.failure is not None and sample.failure.kind == "data"

    def _check_group(self, group: Group, outcome: str, *, cancelled: bool) -> None:
        name = f"group {group.task}/{group.visit}"
        plan = self.plans[group.task]
        self._check_members(name, plan, group, outcome)
        for sample in group.samples:
            self._check_whole(sample, plan)
        statuses = {s.status for s in group.samples}
        failures = [s.failure.kind for s in group.samples if s.failure is not None]
        bad = failures[0] if failures else "waiting"
        expected = "ready" if statuses == {Status.COMPLETED} else bad
        if outcome != expected:
            self.fault(f"{name} ended as {outcome}, its members say {expected}")
        if Status.ABORTED in statuses and not failures and not cancelled:
            self.fault(f"{name} was aborted, and nobody cancelled production")

    def _check_members(self, name: str, plan: Plan, group: Group, outcome: str) -> None:
        """Who is in the group, and whether it can do without those that failed."""
        indexes = [s.index for s in group.samples]
        if indexes != sorted(set(indexes)) or not set(indexes) <= set(range(plan.members)):
            self.fault(f"I7: {name} has the members {indexes}")
        least = plan.failures.least(plan.group_size)
        alive = sum(s.status is not Status.FAILED for s in group.samples)
        failed = len(indexes) - alive
        if outcome == "ready" and not least <= len(indexes) <= plan.group_size:
            self.fault(f"I7: {name} is ready with {indexes}, of {plan.group_size}")
        if failed and alive >= least:
            self.fault(f"I7: {name} was dropped, and {alive} of its members were enough")
        if outcome == "ready" and len(indexes) < plan.group_size:
            self.fired["a group goes on with fewer"] += 1
        if outcome == "ready" and indexes != list(range(len(indexes))):
            self.fired["a spare member makes up for another"] += 1

    def _check_whole(self, sample: Sample, plan: Plan) -> None:
        try:
            check_sample(sample, max_response_tokens=plan.max_response_tokens)
        except AssertionError as error:
            self.fault(f"{sample.uid}: {error}")

    def _check_sample(self, sample: Sample, track: Track) -> None:
        name = track.rollout.uid
        if track.unsure:
            return
        if self.restored and not sample.segments and not any(s.ids for s in track.strands):
            return  # its rollout had not begun again when the engine was saved
        if len(sample.segments) != len(track.strands):
            self.fault(f"I4: {name} has {len(sample.segments)} segments of {len(track.strands)}")
            return
        for segment, strand in zip(sample.segments, track.strands, strict=True):
            expected = strand.columns(trim=track.cut)
            found = (
                segment.ids.tolist(),
                segment.response.origin.tolist(),
                segment.logprobs.tolist(),
                segment.versions.tolist(),
            )
            if segment.prompt_ids.tolist() != strand.prompt:
                self.fault(f"I4: {name} has the prompt {segment.prompt_ids.tolist()}")
            if found != expected:
                self.fault(f"I2 to I4: {name} has the columns {found}, not {expected}")
            for token, logprob, version in zip(found[0], found[2], found[3], strict=False):
                if version > self.version:
                    self.fault(f"I3: {name} has a token of version {version} of {self.version}")
                if version >= 0 and logprob != expected_logprob(token, version):
                    self.fault(f"I3: {name} has a token of another version than {version}")
        self._check_status(sample, track)

    def _check_status(self, sample: Sample, track: Track) -> None:
        name, plan = track.rollout.uid, track.plan
        sampled = any(any(strand.origin) for strand in track.strands)
        good = track.outcome == "returned" and sampled and not track.failed_itself
        match sample.status:
            case Status.COMPLETED:
                score = None if sample.verdict is None else sample.verdict.score
                if not good:
                    self.fault(f"I11: {name} is COMPLETED, but its loop {track.outcome}")
                if score != track.judged:
                    self.fault(f"I11: {name} has the score {score}, not {track.judged}")
                if (score is None) != (plan.judger == "none"):
                    self.fault(f"I11: {name} has the score {score}, judger {plan.judger}")
            case Status.FAILED:
                kind = "" if sample.failure is None else sample.failure.kind
                limited = track.outcome == "cancelled" and plan.limits.sample is not None
                if kind == "judge":
                    if not good or isinstance(track.judged, float):
                        self.fault(f"I11: {name} failed at the judger, which said {track.judged}")
                elif good or (track.outcome == "cancelled" and not limited):
                    self.fault(f"{name} FAILED, but its loop {track.outcome}: {sample.failure}")
            case Status.ABORTED:
                if track.outcome not in (
                    "cancelled",
                    "returned",
                    "quit",
                ):  # it may be cancelled just then
                    self.fault(f"{name} was ABORTED, but its loop {track.outcome}")
            case status:
                self.fault(f"{name} ended as {status}")

    # Where every visit must stand

    def started(self, task: str, visit: int) -> None:
        """A group began."""
        known = self.visits[task].get(visit)
        if known is None:
            self.visits[task][visit] = Visit()
            return
        self.restarts[task] += 1
        plan = self.plans[task]
        allowed = plan.strategy.max_staleness
        if known.group is None or known.state not in ("ready", "waiting"):
            self.fault(f"I8: {task}/{visit} was drawn again while {known.state}")
            return
        good = [s for s in known.group.samples if self.lag(s, self.version, plan) <= allowed]
        known.fresh = {s.index: s for s in good if s.status is Status.COMPLETED}
        known.unjudged = {s.index for s in good if s.unjudged}
        known.judging = set(known.unjudged)
        for index in range(plan.members):
            if index not in {sample.index for sample in good}:
                self.tracks.pop((task, visit, index), None)  # it begins anew
        known.resumed = {s.index for s in good if s.status is Status.ABORTED and not s.unjudged}
        if known.state == "ready" and len(known.fresh) == len(known.group.samples):
            self.fault(f"I9: {task}/{visit} expired, and no member was too old")
        known.state = "flight"
        known.runs += 1

    def ends(self, group: Group, outcome: str) -> None:
        """A group ended."""
        visit = self.visits[group.task].get(group.visit)
        if self.entering and (visit is None or visit.state in ("ready", "waiting")):
            # It was drawn, and had not begun, when the engine was saved.
            self.started(group.task, group.visit)
            self.evicted.add((group.task, group.visit))
            visit = self.visits[group.task][group.visit]
        if visit is None or visit.state != "flight":
            self.fault(f"I7: {group.task}/{group.visit} ended and was not in flight")
            return
        members = {sample.index: sample for sample in group.samples}
        for index, sample in visit.fresh.items():
            if index not in members or not self._same(members[index], sample):
                self.fault(f"I7: {group.task}/{group.visit} gave a fresh member up")
        tracks = [self._track(group, sample, visit) for sample in group.samples]
        visit.group = group
        if outcome in ("ready", "waiting"):
            visit.state = "ready" if outcome == "ready" else "waiting"
        else:
            visit.state = "dropped"
            self.dropped[group.task][outcome] += 1
        plan = self.plans[group.task]
        lost = any(
            s.status is Status.COMPLETED
            and self.lag(s, self.version, plan) > plan.strategy.max_staleness
            for s in group.samples
        )
        evicted = self.evicting or (group.task, group.visit) in self.evicted
        self.evicted.discard((group.task, group.visit))
        cancelled = self.leaving or evicted or lost
        self.ended.append((group, outcome, tracks, cancelled))

    def _track(self, group: Group, sample: Sample, visit: Visit) -> Track | None:
        """What a member must have done."""
        track, index = self.tracks.get((group.task, group.visit, sample.index)), sample.index
        if track is None:
            return None
        if track.run < visit.runs and index in visit.resumed:
            # It was cut again before its loop had begun again.
            track = Track(self, track.plan, track.rollout, track)
            track.outcome = "cancelled"
        elif track.run < visit.runs and index not in visit.fresh and index not in visit.unjudged:
            return None
        if sample.status is Status.ABORTED and not sample.unjudged:
            track.rewind()
        return track

    def _same(self, sample: Sample, other: Sample) -> bool:
        """Whether two samples are one, but for tokens that are masked since."""
        if self.plans[sample.task].token_lag is None and not self.restored:
            return sample is other
        pairs = zip(sample.segments, other.segments, strict=True)
        return sample.uid == other.uid and all(
            a.ids.tolist() == b.ids.tolist() and a.versions.tolist() == b.versions.tolist()
            for a, b in pairs
        )

    def received(self, batch: Batch, asked: int) -> None:
        """A consumer has a batch."""
        if batch.again or self.again:
            self._received_again(batch)
            return
        if batch.index != len(self.batches) + 1:
            self.fault(f"I8: batch {batch.index} follows {len(self.batches)}")
        if not self.keeps_batches:
            self.trained |= {before.index for before in self.batches}
        self.batches.append(batch)
        if batch.version not in (self.version, self.published):
            self.fault(f"I9: a batch of version {batch.version}, the server has {self.version}")
        if batch.short != (len(batch) < asked) or not 0 < len(batch) <= asked:
            self.fault(f"a batch of {len(batch)}, short {batch.short}, {asked} were asked for")
        if batch.short and all(self.plans[name].epochs is None for name in self.visits):
            self.fault("a short batch of endless prompts")
        newest: dict[str, int] = {}
        for group in batch.groups:
            name = f"{group.task}/{group.visit}"
            visit = self.visits[group.task].get(group.visit)
            if (
                visit is None
                or visit.group is None
                or visit.state != "ready"
                or len(group.samples) != len(visit.group.samples)
                or not all(map(self._same, group.samples, visit.group.samples))
            ):
                state = None if visit is None else visit.state
                self.fault(f"I8: {name} was delivered while {state}")
                continue
            visit.state = "delivered"
            plan = self.plans[group.task]
            lags = [self.lag(sample, batch.version, plan) for sample in group.samples]
            self._check_masks(group, batch.version, plan)
            if max(lags) > self.plans[group.task].strategy.max_staleness:
                self.fault(f"I9: {name} was delivered with the lags {lags}")
            self._check_order(name, group.task, int(batch.version - max(lags)), newest)
            if self.plans[group.task].weight == 0:
                self.fault(f"{name} was delivered, its weight is 0")

    def _received_again(self, batch: Batch) -> None:
        """A batch that was not committed comes again: the same groups, in the same order."""
        expected = self.again.pop(0) if self.again else None
        self.fired["a batch comes again"] += 1
        if expected is None or not batch.again or batch.index != expected.index:
            self.fault(f"I8: {batch} came, and was to be {expected}")
            return
        if batch.version != expected.version or len(batch) != len(expected):
            self.fault(f"I8: {batch} came again otherwise than {expected}")
        for group, other in zip(batch.groups, expected.groups, strict=False):
            name = f"{group.task}/{group.visit}"
            if name != f"{other.task}/{other.visit}" or group.rewards != other.rewards:
                self.fault(f"I8: {name} came again as {other.task}/{other.visit}")
            elif not all(map(self._same, group.samples, other.samples)):
                self.fault(f"I8: {name} came again with other samples")

    def _check_order(self, name: str, task: str, oldest: int, before: dict[str, int]) -> None:
        """A batch takes the oldest groups first, or the freshest."""
        last = before.get(task, oldest)
        freshest = getattr(self.plans[task].strategy, "order", "oldest") == "freshest"
        if (oldest > last) if freshest else (oldest < last):
            self.fault(f"{name} was delivered after a group of version {last}")
        before[task] = oldest

    def lag(self, sample: Sample, version: int, plan: Plan) -> float:
        """A sample's lag, counted token by token; without end if nothing is left to train."""
        versions = [
            v
            for s in sample.segments
            for v, made_by in zip(s.versions, s.response.origin, strict=True)
            if made_by
        ]
        if plan.token_lag is None or not versions:
            return version - min(versions, default=version)
        recent = [v for v in versions if v >= version - plan.token_lag]
        if not recent and sample.status is Status.COMPLETED:
            return math.inf
        return version - min(recent, default=version)

    def _check_masks(self, group: Group, version: int, plan: Plan) -> None:
        """Exactly the policy's tokens are trained, but for those that are too old."""
        oldest = 0 if plan.token_lag is None else version - plan.token_lag
        for sample in group.samples:
            for segment in sample.segments:
                expected = [
                    int(made_by == 1 and v >= oldest)
                    for v, made_by in zip(segment.versions, segment.response.origin, strict=True)
                ]
                if list(segment.mask) != expected:
                    self.fault(f"I2: {sample.uid} has the mask {list(segment.mask)}")


def _key(uid: str) -> tuple[str, int, int]:
    """Task, visit and index of a rollout, whichever place it took."""
    task, _, visit, index = uid.split("/")
    return task, int(visit), int(index.partition(".")[0])


class Watcher(Instrument):
    """Tells the world what the engine says."""

    def __init__(self, world: World) -> None:
        self.world = world

    def group_started(self, task: str, visit: int) -> None:
        """A group began."""
        try:
            self.world.started(task, visit)
        except Exception as error:  # the engine would only take the instrument out
            self.world.fault(repr(error))

    def group_ended(self, group: Group, outcome: str) -> None:
        """A group ended."""
        try:
            self.world.ends(group, outcome)
        except Exception as error:
            self.world.fault(repr(error))

    def gate_closed(self, in_flight: int) -> None:
        """A pause began."""
        self.world.closed_since = current_time()
        self.world.gate_closed = True
        self.world.on_closed()

    def gate_opened(self, version: int) -> None:
        """A pause is over."""
        if self.world.evicting:
            self.world.evicted = self.world.in_flight  # a pause that is broken off waits for none
        self.world.gate_closed = self.world.evicting = False
        self.world.closed_seconds += current_time() - self.world.closed_since
        if version != self.world.version:
            self.world.fault(f"the gate opened at {version}, the server has {self.world.version}")


class Server(ScriptedController):
    """A scripted server whose mood changes while it runs."""

    def __init__(self, world: World) -> None:
        super().__init__(self._reply, vocab_size=VOCABULARY, max_context=CONTEXT)
        self.world = world
        self.resume_failures = 0
        self.mislabelled = False
        self.asked: Counter[str] = Counter()

    @property
    def is_paused(self) -> bool:
        """Whether no forward pass can run."""
        return self._paused

    async def generate(self, attempt: Attempt) -> None:
        """Answers, and writes down what it does."""
        mood = self.world.mood
        self._stream, self._admission = mood.stream, mood.admission
        request = self.world.arrived(attempt)
        started = self.world.open_seconds()
        try:
            # A probe waits for no slot.
            probe = attempt.affinity == PROBE
            with nullcontext() if probe else self.world.counted("turns"):
                if mood.down:
                    self.world.fired["the server: down"] += 1
                    await sleep(mood.per_token)
                    raise InferenceError("503: down", retryable=True)
                if mood.fault == "mute":
                    self.world.fired["the server: mute"] += 1
                    await sleep(mood.per_token)
                    if self._keeping or self._paused:
                        return
                    logprob = expected_logprob(5, self._version)
                    self.world.by_hand += request.commit([5], [logprob], self._version)
                    return  # without saying why
                await super().generate(cast("Attempt", request))
                if mood.linger:
                    await sleep(mood.linger)
        except InferenceError as error:
            request.may_pass = error.retryable
            raise
        finally:
            request.over = True
            request.ended = current_time()
            request.spent = self.world.open_seconds() - started

    def begin_with(self, version: int) -> None:
        """Has these weights from the beginning."""
        self._version = version

    async def abort(self, ids: Collection[str] | None) -> None:
        """Aborts, soon or late or not at all."""
        delay = self.world.mood.abort
        if delay is None:
            await checkpoint()
            raise InferenceError("503: abort is broken")
        self._abort_delay = delay
        await super().abort(ids)

    async def pause(self, mode: PauseMode) -> None:
        """Pauses, or not."""
        match self.world.mood.pause:
            case "slow":
                await sleep(0.5)
            case "hangs":
                self.log.append(("pause", mode))
                await sleep_forever()
            case "fails":
                self.log.append(("pause", mode))
                await checkpoint()
                raise InferenceError("503: pause is broken")
            case _:
                pass
        await super().pause(mode)

    async def resume(self) -> None:
        """Resumes, after some failures."""
        if self.resume_failures:
            self.resume_failures -= 1
            await checkpoint()
            raise InferenceError("503: not yet", retryable=True)
        await super().resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Takes new weights."""
        try:
            await super().update_weights(source, version)
        finally:
            self.world.version = max(self.world.version, self._version)

    async def version(self) -> int | None:
        """The version it has, or says that it has."""
        reported = await super().version()
        return 10**6 if self.mislabelled else reported

    def _reply(self, attempt: Attempt) -> Reply:
        mood = self.world.mood
        self.asked[attempt.affinity] += 1
        random = Random(f"{self.world.seed}/{attempt.affinity}/{self.asked[attempt.affinity]}")
        wanted = random.randint(1, attempt.max_tokens + 2)
        wanted = max(wanted, attempt.sampling.min_tokens)
        ids = [random.randrange(1, VOCABULARY) for _ in range(wanted)]
        if random.random() < 0.4:
            ids[-1] = STOP_ID
        reply = Reply(ids, delay=mood.per_token * len(ids), deaf=mood.deaf)
        if mood.fault is not None and random.random() < mood.often:
            reply = self._faulty(reply, mood.fault, attempt)
        return reply

    def _faulty(self, reply: Reply, fault: str, attempt: Attempt) -> Reply:
        self.world.fired[f"the server: {fault}"] += 1
        ids = list(reply.ids)
        good = [expected_logprob(i, self._version) for i in ids]
        older = self._version - 1
        changes: dict[str, dict[str, Any]] = {
            "error": {"error": InferenceError("500", retryable=True)},
            "crash": {"error": ZeroDivisionError("the client is broken")},
            "misaligned": {"logprobs": good[: min(len(ids), attempt.max_tokens) - 1]},
            "nan": {"logprobs": [float("nan"), *good[1:]]},
            "positive": {"logprobs": [1.0, *good[1:]]},
            "empty": {"ids": []},
            "cut": {"ids": ids[: len(ids) // 2], "finish": "abort"},
            "unknown finish": {"finish": "banana"},
            "echo": {"echo": [1, 2, 3]},
            "vocabulary": {"ids": [*ids[:-1], VOCABULARY], "overrun": True},
            # A version that no update reaches while a turn is frozen: there it would be no lie that one could tell.
            "newer": {"versions": [self._version + 10_000] * len(ids)},
            # Of a request that was sent under older weights, and frozen over their update, nobody could tell.
            "older": {"versions": [older] * len(ids)} if 0 <= older < attempt.version else {},
            "overrun": {"ids": [*ids, 5, 6, 7], "overrun": True},
        }
        return evolve(reply, **changes[fault])
