"""A snapshot of an engine, and the files that it becomes.

The snapshot is noted on the event loop. Its files are made later, in a thread, line by line and column by column, so
that nothing large is put together and the event loop goes on. Nothing that goes on changing is read then.

    groups.jsonl            a line for each visit that has not ended: where it stood, its samples, their journals
    prompts.jsonl           prompts of sources, which nobody else could give again
    columns.safetensors     token columns of all samples and journals
    engine.json             versions, seeds, counters, positions, batches that are not committed
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from attrs import frozen

from ._capture import GroupNote, Visit
from ._checkpoint import Files
from ._codecs import encode
from ._columns import Column, ColumnData, write_columns
from ._journal import AS_THE_TASK, Journal, Judged, Outcome, Raised, RecordedCall, Returned
from ._lives import Life
from ._options import Sampling
from ._records import Batch, Prompt, Sample, Turn, Verdict
from ._response import Response
from ._sampler import SamplerNote
from ._table import TableNote
from ._wire import (
    WireBatch,
    WireCall,
    WireContext,
    WireEngine,
    WireFailure,
    WireGroup,
    WireJournal,
    WireLife,
    WirePrompt,
    WireRequest,
    WireSample,
    WireTask,
    WireTurn,
    WireVerdict,
    text,
    to_json,
)
from .errors import CheckpointError, LoopError

__all__ = ["COLUMNS", "ENGINE", "GROUPS", "PROMPTS", "Snapshot", "TaskNote"]

GROUPS = "groups.jsonl"
PROMPTS = "prompts.jsonl"
COLUMNS = "columns.safetensors"
ENGINE = "engine.json"


@frozen(eq=False, kw_only=True)
class TaskNote:
    """One task.

    Attributes:
        group_size: Members of a group.
        shuffle: Whether each epoch has an order of its own.
        prompts: Prompts of the sequence; `None` with a source.
        sampler: Where its prompts are.
        table: The rows that wait, and counters.
        flight: What makes the notes of the groups in flight.
        tokens: Counters of tokens.
        produced: Counters of completed samples.
    """

    group_size: int
    shuffle: bool
    prompts: Sequence[Prompt] | None
    sampler: SamplerNote
    table: TableNote
    flight: Sequence[Callable[[], GroupNote]]
    tokens: Mapping[str, int]
    produced: Mapping[str, float]


@frozen(eq=False, kw_only=True)
class Snapshot:
    """An engine at one moment.

    Attributes:
        run: Names the run, over all restarts.
        version: The policy's weight version.
        seed: The engine's seed.
        start_paused: Whether the policy got its first weights from the trainer.
        vocab_size: The policy's.
        turns_in_flight: Turns at the server.
        batches: Batches handed over so far.
        taken: A version, and how many batches were taken with it.
        owed: What tasks are owed of the next batches.
        uncommitted: Batches that are not committed.
        tasks: The tasks.
    """

    run: str
    version: int
    seed: int
    start_paused: bool
    vocab_size: int
    turns_in_flight: int
    batches: int
    taken: tuple[int, int]
    owed: Mapping[str, Fraction]
    uncommitted: Sequence[Batch]
    tasks: Mapping[str, TaskNote]

    def manifest(self) -> dict[str, Any]:
        """What its manifest says."""
        return {
            "run": self.run,
            "version": self.version,
            "batches": self.batches,
            "uncommitted": [batch.index for batch in self.uncommitted],
            "tasks": list(self.tasks),
        }

    def files(self, fingerprints: Mapping[str, str], breathe: Callable[[], object] = bool) -> Files:
        """Returns its files, which are made while they are gone through, in this order.

        Args:
            fingerprints: What tells the prompts of each task that has a sequence from others.
            breathe: Called again and again.
        """
        encoder = _Encoder(breathe)
        return {
            GROUPS: self._groups(encoder),
            PROMPTS: self._prompts(encoder),
            COLUMNS: encoder.columns(),
            ENGINE: self._engine(encoder, fingerprints),
        }

    def visits(self) -> Iterator[Visit]:
        """Every visit that has not ended, delivered ones first."""
        for batch in self.uncommitted:
            for group in batch.groups:
                yield Visit(place="delivered", group=group, batch=batch.index)
        for task in self.tasks.values():
            yield from task.table.visits()
            for note in task.flight:
                yield note().cut()

    def _groups(self, encoder: _Encoder) -> Iterator[bytes]:
        for visit in self.visits():
            encoder.breathe()
            named = self.tasks[visit.group.task].prompts is not None
            yield text(encoder.group(visit, named=named))

    def _prompts(self, encoder: _Encoder) -> Iterator[bytes]:
        for task in self.tasks.values():
            for prompt in task.sampler.held:
                encoder.prompt(prompt)
        for prompt in encoder.prompts:
            yield text(_wire_prompt(prompt))

    def _engine(self, encoder: _Encoder, fingerprints: Mapping[str, str]) -> Iterator[bytes]:
        tasks = {
            name: WireTask(
                group_size=task.group_size,
                shuffle=task.shuffle,
                prompts=None if task.prompts is None else len(task.prompts),
                fingerprint=fingerprints.get(name),
                epoch=task.sampler.epoch,
                drawn=task.sampler.drawn,
                source=to_json(task.sampler.state),
                held=[encoder.prompt(prompt) for prompt in task.sampler.held],
                ended=task.sampler.ended,
                table=dict(task.table.counters),
                tokens=dict(task.tokens),
                produced=dict(task.produced),
            )
            for name, task in self.tasks.items()
        }
        yield text(
            WireEngine(
                run=self.run,
                version=self.version,
                seed=self.seed,
                start_paused=self.start_paused,
                vocab_size=self.vocab_size,
                turns_in_flight=self.turns_in_flight,
                batches=self.batches,
                taken=self.taken,
                owed={name: str(share) for name, share in self.owed.items()},
                samplings=encoder.samplings,
                uncommitted=[
                    WireBatch(
                        index=batch.index,
                        version=batch.version,
                        short=batch.short,
                        statistics=batch.statistics,
                        tasks=dict(batch.tasks),
                    )
                    for batch in self.uncommitted
                ],
                tasks=tasks,
            )
        )


class _Encoder:
    """Makes records, and gives numbers to what several of them share.

    Attributes:
        prompts: Prompts of sources.
        samplings: What samples were sampled with.
        breathe: Called again and again.
    """

    def __init__(self, breathe: Callable[[], object]) -> None:
        self.breathe = breathe
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []
        self._prompts: dict[int, int] = {}
        self._samplings: dict[Sampling, int] = {}
        self._responses: dict[int, int] = {}
        self._kept: list[Response] = []
        self._ids_of_prompts: list[memoryview[int]] = []
        self._arrays: dict[int, int] = {}

    def columns(self) -> Iterator[bytes | memoryview]:
        """The column file of all that was given a number."""
        versions, run_stops = array("i"), array("i")
        runs, stops, prompt_stops = array("q"), array("q"), array("q")
        total = 0
        for response in self._kept:
            self.breathe()
            for version, _, stop in response.version_runs:
                versions.append(version)
                run_stops.append(stop)
            runs.append(len(versions))
            total += len(response)
            stops.append(total)
        in_prompts = 0
        for prompt_ids in self._ids_of_prompts:
            in_prompts += len(prompt_ids)
            prompt_stops.append(in_prompts)
        columns: dict[str, Column | Sequence[ColumnData | memoryview[Any]]] = {
            "prompts.ids": self._ids_of_prompts,
            "prompts.stops": [prompt_stops],
        }
        if self._kept:
            # Views are made when they are written: so many at once would have the garbage collector go through all
            # that there is, and nothing else runs meanwhile.
            columns["responses.ids"] = Column("i", total, self._each(lambda r: r.ids))
            columns["responses.logprobs"] = Column("f", total, self._each(lambda r: r.logprobs))
        columns |= {
            "responses.stops": [stops],
            "responses.runs": [runs],
            "runs.versions": [versions],
            "runs.stops": [run_stops],
        }
        yield from write_columns(columns)

    def _each(self, view: Callable[[Response], memoryview[Any]]) -> Iterator[memoryview[Any]]:
        for response in self._kept:
            self.breathe()
            yield view(response)

    def prompt(self, prompt: Prompt) -> int:
        """A source's prompt."""
        number = self._prompts.setdefault(id(prompt), len(self.prompts))
        if number == len(self.prompts):
            self.prompts.append(prompt)
        return number

    def group(self, visit: Visit, *, named: bool) -> WireGroup:
        """One visit; its prompt is named by its uid, or given a number."""
        group, record = visit.group, visit.record
        return WireGroup(
            task=group.task,
            prompt=group.prompt.uid if named else self.prompt(group.prompt),
            visit=group.visit,
            place=visit.place,
            samples=[self._sample(sample) for sample in group.samples],
            journals=[self._journal(index, j) for index, j in visit.journals.items()],
            seconds=visit.seconds,
            expiries=visit.expiries,
            in_tail=visit.in_tail,
            restart=visit.restart,
            batch=visit.batch,
            counted=sorted(visit.counted),
            left=list(visit.left),
            discarded=visit.discarded,
            unseen=visit.unseen,
            restarted=visit.restarted,
            places=list(visit.tries.places.items()),
            failures=[(i, kind, n) for (i, kind), n in visit.tries.failures.items()],
            gone=sorted(visit.tries.gone),
            lives=None if record is None else [self._life(life) for life in record.lives],
            judged=[[self._sample(s) for s in said] for said in record.judged] if record else [],
        )

    def _life(self, life: Life) -> WireLife:
        index, journal = life.sample.index, life.journal
        return WireLife(
            index=index,
            place=life.place,
            sample=None if life.member else self._sample(life.sample),
            journal=None if journal is None else self._journal(index, journal),
            left=life.left,
            told=life.told,
        )

    def _sample(self, sample: Sample) -> WireSample:
        self.breathe()
        failure = sample.failure
        return WireSample(
            index=sample.index,
            status=sample.status.value,
            segments=[
                (self._ids(s.prompt_ids), self._response(s.response), s.trained_from)
                for s in sample.segments
            ],
            turns=[_wire_turn(turn) for turn in sample.turns],
            finish_reason=sample.finish_reason,
            verdict=None
            if sample.verdict is None
            else _wire_verdict(sample.verdict, f"sample {sample.uid}"),
            failure=None
            if failure is None
            else WireFailure(
                kind=failure.kind, message=failure.message, traceback=failure.traceback
            ),
            unjudged=sample.unjudged,
            sampling=self._sampling(sample.sampling),
            logprobs_mode=sample.logprobs_mode,
            generate_seconds=sample.generate_seconds,
        )

    def _journal(self, index: int, journal: Journal) -> WireJournal:
        return WireJournal(
            index=index,
            seed=journal.seed,
            attempts=journal.attempts,
            place=journal.place,
            contexts=[
                WireContext(
                    prompt=self._ids(context.prompt_ids),
                    response=self._response(context.response),
                    turns=[
                        (
                            recorded.begun,
                            None
                            if recorded.request == AS_THE_TASK
                            else WireRequest(
                                sampling=self._sampling(recorded.request.sampling),
                                max_tokens=recorded.request.max_tokens,
                            ),
                            _wire_turn(recorded.turn),
                        )
                        for recorded in context.turns
                    ],
                )
                for context in journal.contexts
            ],
            calls=[_wire_call(call) for call in journal.calls],
        )

    def _sampling(self, sampling: Sampling | None) -> int | None:
        if sampling is None:
            return None
        number = self._samplings.setdefault(sampling, len(self.samplings))
        if number == len(self.samplings):
            self.samplings.append(sampling)
        return number

    def _response(self, response: Response) -> int:
        number = self._responses.setdefault(id(response), len(self._kept))
        if number == len(self._kept):
            self._kept.append(response)  # kept, so that no other one gets its identity
        return number

    def _ids(self, ids: memoryview[int]) -> int:
        # Members share one array; the views of it are many.
        number = self._arrays.setdefault(id(ids.obj), len(self._ids_of_prompts))
        if number == len(self._ids_of_prompts):
            self._ids_of_prompts.append(ids)
        return number


def _wire_turn(turn: Turn) -> WireTurn:
    return turn.finish_reason, turn.text, turn.segment, turn.start, turn.stop, turn.attempts


def _wire_verdict(verdict: Verdict, whose: str) -> WireVerdict:
    details = None
    if verdict.details:
        details = _plain(dict(verdict.details), f"the verdict of {whose} has details with")
    return WireVerdict(score=verdict.score, parts=dict(verdict.parts), details=details)


def _wire_call(call: RecordedCall) -> WireCall:
    return WireCall(
        begun=call.begun,
        strand=call.strand,
        kind=call.kind,
        name=call.name,
        given=call.given,
        outcome=None if call.outcome is None else _wire_outcome(call.outcome),
    )


def _wire_outcome(outcome: Outcome) -> list[Any]:
    match outcome:
        case Returned(value):
            return ["returned", to_json(value)]
        case Raised(message):
            return ["raised", message]
        case Judged(verdict):
            wire = _wire_verdict(verdict, "judge()")
            return ["judged", wire.score, wire.parts, wire.details]


def _wire_prompt(prompt: Prompt) -> WirePrompt:
    said = f"prompt {prompt.uid!r} of a source has a"
    return WirePrompt(
        uid=prompt.uid,
        messages=None
        if prompt.messages is None
        else _plain([dict(m) for m in prompt.messages], f"{said} message with"),
        token_ids=None if prompt.token_ids is None else list(prompt.token_ids),
        label=_plain(prompt.label, f"{said} label with"),
        data_source=prompt.data_source,
        tools=None
        if prompt.tools is None
        else _plain([dict(tool) for tool in prompt.tools], f"{said} tool with"),
        media=_plain(prompt.media, f"{said} media with"),
        meta=_plain(dict(prompt.meta), f"{said} meta with") if prompt.meta else None,
    )


def _plain(value: object, said: str) -> Any:
    try:
        return to_json(encode(value, said))
    except LoopError as error:
        text = str(error).replace("a journal can't hold", "a checkpoint can't hold")
        raise CheckpointError(text) from error.__cause__
