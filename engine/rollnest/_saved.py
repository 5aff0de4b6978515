"""What a checkpoint's files say, as live records again.

Everything is checked, and made by the constructors that check what must hold of it, before anything of it gets into an
engine. What can't be used is named by its file and line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from attrs import field, frozen
from cattrs import transform_error

from ._capture import Tries, Visit
from ._codecs import decode
from ._columns import ColumnData, ColumnError, read_columns
from ._journal import (
    AS_THE_TASK,
    Journal,
    Judged,
    Outcome,
    Raised,
    RecordedCall,
    RecordedContext,
    RecordedTurn,
    Request,
    Returned,
)
from ._lives import GroupRecord, Life
from ._options import Sampling
from ._records import Batch, Failure, Group, Prompt, Sample, Segment, Status, Turn, Verdict
from ._response import CONTEXT_VERSION, Response
from ._sampler import SamplerNote
from ._snapshot import COLUMNS, ENGINE, GROUPS, PROMPTS
from ._wire import (
    WireBatch,
    WireCall,
    WireEngine,
    WireGroup,
    WireJournal,
    WireLife,
    WirePrompt,
    WireSample,
    WireTask,
    WireTurn,
    from_json,
    read,
)
from .errors import CheckpointError, describe

__all__ = ["Saved", "read_engine", "read_groups", "read_saved"]

T = TypeVar("T")


@frozen(eq=False, kw_only=True)
class Saved:
    """A checkpoint, checked.

    Attributes:
        engine: Versions, seeds, counters and positions.
        visits: Visits that had not ended and were not delivered.
        batches: Batches that were not committed, oldest first.
        samplers: Where each task's prompts are.
    """

    engine: WireEngine
    visits: Sequence[Visit]
    batches: Sequence[Batch]
    samplers: Mapping[str, SamplerNote]


def read_engine(files: Mapping[str, bytes], where: str) -> WireEngine:
    """Reads what is said of the engine.

    Raises:
        CheckpointError: It can't be used.
    """
    return _each(files, ENGINE, where, lambda line: read(line, WireEngine))[0]


def read_groups(files: Mapping[str, bytes], where: str) -> list[WireGroup]:
    """Reads what is said of the groups, without their columns.

    Raises:
        CheckpointError: It can't be used.
    """
    return _each(files, GROUPS, where, lambda line: read(line, WireGroup))


def read_saved(
    engine: WireEngine,
    files: Mapping[str, bytes],
    prompts: Mapping[str, Mapping[str, Prompt]],
    where: str,
) -> Saved:
    """Reads everything.

    Args:
        engine: What `read_engine` returned.
        files: The checkpoint's files.
        prompts: Of each task that has a sequence of them, its prompts by uid.
        where: Names the checkpoint in errors.

    Raises:
        CheckpointError: Something can't be used.
    """
    drawn = _each(files, PROMPTS, where, lambda line: _prompt(read(line, WirePrompt)))
    decoder = _Decoder(_columns(files, where), engine.samplings, prompts, drawn)
    visits = _each(files, GROUPS, where, lambda line: decoder.visit(read(line, WireGroup)))
    return Saved(
        engine=engine,
        visits=[visit for visit in visits if visit.place != "delivered"],
        batches=_batches(engine.uncommitted, visits, where),
        samplers={name: _sampler(task, drawn) for name, task in engine.tasks.items()},
    )


def _sampler(task: WireTask, drawn: Sequence[Prompt]) -> SamplerNote:
    held = [_item(drawn, number) for number in task.held]
    return SamplerNote(task.epoch, task.drawn, from_json(task.source), held, task.ended)


def _each(files: Mapping[str, bytes], name: str, where: str, make: Callable[[bytes], T]) -> list[T]:
    if name not in files:
        raise CheckpointError(f"{where} lacks the file {name!r}")
    made: list[T] = []
    for number, line in enumerate(files[name].splitlines(), 1):
        try:
            made.append(make(line))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{where}, line {number} of {name!r}, can't be used: {_said(error)}"
            ) from error
    return made


def _said(error: Exception) -> str:
    if isinstance(error, BaseExceptionGroup):  # cattrs' own, which has all that is wrong
        return "; ".join(transform_error(cast("Any", error)))
    return describe(error)


def _batches(wires: Sequence[WireBatch], visits: Sequence[Visit], where: str) -> list[Batch]:
    groups: dict[int, list[Group]] = {wire.index: [] for wire in wires}
    for visit in visits:
        if visit.place == "delivered":
            if visit.batch not in groups:
                raise CheckpointError(f"{where} has a group of batch {visit.batch}, which it lacks")
            groups[visit.batch].append(visit.group)
    return [
        Batch(
            index=wire.index,
            version=wire.version,
            groups=groups[wire.index],
            tasks=wire.tasks,
            statistics=wire.statistics,
            short=wire.short,
        )
        for wire in sorted(wires, key=lambda wire: wire.index)
    ]


@frozen(eq=False)
class _Columns:
    """The token columns of a checkpoint, made of the file when they are asked for."""

    _files: Mapping[str, ColumnData]
    _responses: dict[int, Response] = field(factory=dict[int, Response])
    _prompts: dict[int, memoryview[int]] = field(factory=dict[int, "memoryview[int]"])

    def prompt(self, number: int) -> memoryview[int]:
        """Ids of a prompt; several samples share one."""
        known = self._prompts.get(number)
        if known is None:
            start, stop = self._span("prompts.stops", number)
            ids = self._ints("prompts.ids")[start:stop]
            if len(ids) != stop - start:
                raise ValueError(f"the ids of prompt {number} are cut short")
            known = self._prompts[number] = memoryview(ids).toreadonly()
        return known

    def response(self, number: int) -> Response:
        """A response, sealed."""
        known = self._responses.get(number)
        if known is None:
            known = self._responses[number] = self._response(number)
        return known

    def _response(self, number: int) -> Response:
        start, stop = self._span("responses.stops", number)
        ids = self._ints("responses.ids")[start:stop]
        logprobs = self._files.get("responses.logprobs", array("f"))[start:stop]
        first, last = self._span("responses.runs", number)
        versions = self._ints("runs.versions")[first:last]
        stops = self._ints("runs.stops")[first:last]
        response = Response()
        for version, end in zip(versions, stops, strict=True):
            begin = len(response)
            if not begin < end <= len(ids):
                raise ValueError(f"response {number} has a run of tokens from {begin} to {end}")
            if version == CONTEXT_VERSION:
                response.append_context(ids[begin:end])
            else:
                response.append_policy(ids[begin:end], logprobs[begin:end], version)
        if len(response) != stop - start:
            raise ValueError(f"response {number} has {len(response)} tokens, not {stop - start}")
        return response.seal()

    def _span(self, name: str, number: int) -> tuple[int, int]:
        stops = self._ints(name)
        if not 0 <= number < len(stops):
            raise ValueError(f"there is no number {number} in {name!r}, which has {len(stops)}")
        start = stops[number - 1] if number else 0
        if not 0 <= start <= stops[number]:
            raise ValueError(f"{name!r} goes back at {number}")
        return start, stops[number]

    def _ints(self, name: str) -> array[int]:
        return cast("array[int]", self._files.get(name, array("i")))


def _columns(files: Mapping[str, bytes], where: str) -> _Columns:
    if COLUMNS not in files:
        raise CheckpointError(f"{where} lacks the file {COLUMNS!r}")
    try:
        return _Columns(read_columns(files[COLUMNS]))
    except ColumnError as error:
        raise CheckpointError(f"{where} can't be used: {COLUMNS!r} {error}") from error


class _Decoder:
    """Makes live records of those on the wire."""

    def __init__(
        self,
        columns: _Columns,
        samplings: Sequence[Sampling],
        named: Mapping[str, Mapping[str, Prompt]],
        drawn: Sequence[Prompt],
    ) -> None:
        self._columns = columns
        self._samplings = samplings
        self._named = named
        self._drawn = drawn

    def visit(self, wire: WireGroup) -> Visit:
        """One visit of a prompt."""
        named = self._named.get(wire.task)
        prompt = _item(self._drawn, wire.prompt) if named is None else named[wire.prompt]
        samples = [self._sample(one, wire, prompt) for one in wire.samples]
        journals = {one.index: self._journal(one) for one in wire.journals}
        unknown = journals.keys() - {sample.index for sample in samples}
        if unknown:
            raise ValueError(f"there are journals of members {sorted(unknown)}, which it lacks")
        return Visit(
            place=wire.place,
            group=Group(wire.task, prompt, wire.visit, samples),
            journals=journals,
            seconds=wire.seconds,
            expiries=wire.expiries,
            in_tail=wire.in_tail,
            restart=wire.restart,
            batch=wire.batch,
            counted=frozenset(wire.counted),
            left=tuple(wire.left),
            discarded=wire.discarded,
            unseen=wire.unseen,
            restarted=wire.restarted,
            tries=Tries(
                dict(wire.places),
                {(index, cast("Any", kind)): n for index, kind, n in wire.failures},
                frozenset(wire.gone),
            ),
            record=None if wire.lives is None else self._record(wire, wire.lives, samples, prompt),
        )

    def _record(
        self,
        wire: WireGroup,
        lives: Sequence[WireLife],
        samples: Sequence[Sample],
        prompt: Prompt,
    ) -> GroupRecord:
        members = {sample.index: sample for sample in samples}
        if sorted(life.index for life in lives if life.sample is None) != sorted(members):
            raise ValueError(f"the members {sorted(members)} are not among those of its loop")

        def life_of(one: WireLife) -> Life:
            sample = one.sample
            if sample is not None and sample.index != one.index:
                raise ValueError(f"member {one.index} has the sample of member {sample.index}")
            return Life(
                sample=members[one.index] if sample is None else self._sample(sample, wire, prompt),
                place=one.place,
                journal=None if one.journal is None else self._journal(one.journal),
                left=one.left,
                member=sample is None,
                told=one.told,
            )

        judged = [[self._sample(one, wire, prompt) for one in said] for said in wire.judged]
        return GroupRecord([life_of(one) for one in lives], judged)

    def _sample(self, wire: WireSample, group: WireGroup, prompt: Prompt) -> Sample:
        segments = tuple(
            Segment(self._columns.prompt(ids), self._columns.response(number), trained_from)
            for ids, number, trained_from in wire.segments
        )
        failure, verdict = wire.failure, wire.verdict
        return Sample(
            task=group.task,
            prompt=prompt,
            visit=group.visit,
            index=wire.index,
            status=Status(wire.status),
            segments=segments,
            turns=tuple(
                _turn(turn, segments[_index(turn, segments)].response) for turn in wire.turns
            ),
            finish_reason=wire.finish_reason,
            verdict=None
            if verdict is None
            else _verdict(verdict.score, verdict.parts, verdict.details),
            failure=None
            if failure is None
            else Failure(cast("Any", failure.kind), failure.message, failure.traceback),
            unjudged=wire.unjudged,
            sampling=self._sampling(wire.sampling),
            logprobs_mode=cast("Any", wire.logprobs_mode),
            generate_seconds=wire.generate_seconds,
        )

    def _journal(self, wire: WireJournal) -> Journal:
        contexts: list[RecordedContext] = []
        for context in wire.contexts:
            response = self._columns.response(context.response)
            turns: list[RecordedTurn] = []
            for begun, request, turn in context.turns:
                said = AS_THE_TASK
                if request is not None:
                    said = Request(self._sampling(request.sampling), request.max_tokens)
                turns.append(RecordedTurn(begun, said, _turn(turn, response)))
            ids = self._columns.prompt(context.prompt)
            contexts.append(RecordedContext(ids, response, tuple(turns)))
        return Journal(
            seed=wire.seed,
            attempts=wire.attempts,
            place=wire.place,
            contexts=tuple(contexts),
            calls=tuple(_call(call) for call in wire.calls),
        )

    def _sampling(self, number: int | None) -> Sampling | None:
        return None if number is None else _item(self._samplings, number)


def _item(items: Sequence[T], number: Any) -> T:
    if not isinstance(number, int) or not 0 <= number < len(items):
        raise ValueError(f"there is no number {number!r} among {len(items)}")
    return items[number]


def _index(turn: WireTurn, segments: Sequence[Segment]) -> int:
    number = turn[2]
    if not 0 <= number < len(segments):
        raise ValueError(f"a turn is in segment {number} of {len(segments)}")
    return number


def _turn(wire: WireTurn, response: Response) -> Turn:
    reason, text, segment, start, stop, attempts = wire
    if reason not in ("stop", "length", "timeout", "abort"):
        raise ValueError(f"a turn ended with {reason!r}")
    if not 0 <= start <= stop <= len(response):
        raise ValueError(f"a turn is at {start}:{stop} of {len(response)} tokens")
    return Turn(cast("Any", reason), text, segment, start, stop, attempts, response)


def _verdict(score: float, parts: Mapping[str, float], details: Any) -> Verdict:
    return Verdict(
        score, parts=parts, details={} if details is None else decode(from_json(details))
    )


def _call(wire: WireCall) -> RecordedCall:
    if wire.kind not in ("tool", "judge"):
        raise ValueError(f"a call is of kind {wire.kind!r}")
    return RecordedCall(
        wire.begun,
        wire.strand,
        cast("Any", wire.kind),
        wire.name,
        wire.given,
        None if wire.outcome is None else _outcome(wire.outcome),
    )


def _outcome(wire: Any) -> Outcome:
    match wire:
        case ["returned", value]:
            return Returned(from_json(value))
        case ["raised", str(message)]:
            return Raised(message)
        case ["judged", score, parts, details]:
            return Judged(_verdict(score, parts, details))
        case _:
            raise ValueError(f"a call ended as {wire!r}")


def _prompt(wire: WirePrompt) -> Prompt:
    def plain(value: Any) -> Any:
        return decode(from_json(value))

    return Prompt(
        wire.uid,
        messages=plain(wire.messages),
        token_ids=wire.token_ids,
        label=plain(wire.label),
        data_source=wire.data_source,
        tools=plain(wire.tools),
        media=plain(wire.media),
        meta=plain(wire.meta) or {},
    )
