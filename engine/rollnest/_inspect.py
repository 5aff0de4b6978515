"""What is in a checkpoint, without the engine, the tasks or the policy that it is of."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

from attrs import asdict, field, frozen

from ._checkpoint import checkpoints, read_files
from ._columns import ColumnData, ColumnError, read_columns
from ._response import CONTEXT_VERSION
from ._saved import read_engine, read_groups
from ._snapshot import COLUMNS
from ._wire import WireGroup, WireTask
from .errors import CheckpointError

__all__ = ["CheckpointInfo", "CheckpointTask", "inspect_checkpoint"]


@frozen(kw_only=True)
class CheckpointTask:
    """One task of a checkpoint.

    Attributes:
        prompts: Prompts of its sequence; `None` with a `PromptSource`.
        epoch: The epoch, counted from 0; 0 with a source.
        position: Prompts drawn in this epoch; with a source how many it gave in all.
        held: Prompts that a source gave and that no group has taken.
        ended: Whether the source has said that there are no more.
        drawn: Prompt visits.
        delivered: Groups handed to the trainer; those that are not committed too.
        dropped: Groups dropped, by reason.
        places: Groups by where they stood: `"ready"`, `"flight"`, and those that wait to be drawn again: `"cut"`,
            `"expired"`, and `"held"` for a tail batch.
        samples: Samples of these groups, by status; what had not ended is `"aborted"`, as if it had been cut.
        unjudged: Aborted samples that lack their verdict only.
        journals: Samples that go on from a journal.
        turns: Whole turns in these journals.
        partial_turns: Turns in them that had not ended.
        calls: Calls of tools and judgers in them.
        unknown_calls: Calls that had begun and not ended.
        tokens: Response tokens of these groups.
        versions: How many of these samples have tokens of which weight version.
    """

    prompts: int | None
    epoch: int
    position: int
    held: int
    ended: bool
    drawn: int
    delivered: int
    dropped: Mapping[str, int]
    places: Mapping[str, int]
    samples: Mapping[str, int]
    unjudged: int
    journals: int
    turns: int
    partial_turns: int
    calls: int
    unknown_calls: int
    tokens: int
    versions: Mapping[int, int]


@frozen(kw_only=True, repr=False)
class CheckpointInfo:
    """What is in a checkpoint. Printing it gives a table.

    Attributes:
        path: Its folder.
        others: Names of older checkpoints beside it.
        run: Names the run, over all restarts.
        version: The policy's weight version.
        seed: The engine's seed.
        vocab_size: The policy's.
        batches: Batches handed over.
        uncommitted: Of these, those that are not committed, with how many groups each has.
        turns_in_flight: Turns that were at the server.
        size: Bytes of all files.
        tasks: Its tasks.
    """

    path: str
    others: Sequence[str]
    run: str
    version: int
    seed: int
    vocab_size: int
    batches: int
    uncommitted: Mapping[int, int]
    turns_in_flight: int
    size: int
    tasks: Mapping[str, CheckpointTask] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns it as plain data, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        tasks = ", ".join(self.tasks)
        return f"<CheckpointInfo of {self.path}: v{self.version}, {self.batches} batches, tasks {tasks}>"

    def __str__(self) -> str:
        open_ = ", ".join(f"{n} ({groups} groups)" for n, groups in self.uncommitted.items())
        lines = [
            ("checkpoint", self.path),
            ("older ones", ", ".join(self.others) or "none"),
            ("run", self.run),
            ("size", f"{self.size / 1e6:,.1f} MB"),
            ("weights", f"version {self.version}"),
            ("batches", f"{self.batches}, not committed: {open_ or 'none'}"),
            ("turns", f"{self.turns_in_flight} in flight"),
        ]
        for name, task in self.tasks.items():
            lines += [("", ""), ("task", name), *_rows(task)]
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {value}".rstrip() for label, value in lines)


def _rows(task: CheckpointTask) -> list[tuple[str, str]]:
    of = "given by its source" if task.prompts is None else f"of {task.prompts} drawn"
    where = f"epoch {task.epoch}, " if task.prompts is not None else ""
    held = f", {task.held} held" if task.held else ""
    ended = ", which has ended" if task.ended else ""
    recorded = (
        f"{task.journals}: {task.turns} turns, {task.partial_turns} partial turns, {task.calls} calls, "
        f"{task.unknown_calls} of them not ended"
    )
    return [
        ("  prompts", f"{where}{task.position} {of}{held}{ended}"),
        ("  visits", f"{task.drawn} drawn, {task.delivered} delivered"),
        ("  dropped", _counts(task.dropped)),
        ("  groups", _counts(task.places)),
        ("  samples", f"{_counts(task.samples)}, {task.unjudged} unjudged"),
        ("  journals", recorded),
        ("  tokens", f"{task.tokens:,}"),
        ("  versions", _counts({f"v{v}": n for v, n in task.versions.items()}, "samples")),
    ]


def _counts(counts: Mapping[str, int], what: str = "") -> str:
    named = f" {what}" if what else ""
    return (
        ", ".join(f"{count} {name}" for name, count in counts.items()) + named if counts else "none"
    )


def inspect_checkpoint(path: str | PathLike[str]) -> CheckpointInfo:
    """Reads what is in a checkpoint, and checks all of it.

    Args:
        path: A checkpoint's folder, or the folder of several: then the newest.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    folder = Path(path)
    others: list[Path] = []
    known = checkpoints(folder)
    if known:
        *others, folder = known
    elif not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint in {fspath(path)}")
    manifest, files = read_files(folder)
    where = f"checkpoint {folder}"
    engine = read_engine(files, where)
    groups = read_groups(files, where)
    try:
        columns = read_columns(files[COLUMNS])
    except (KeyError, ColumnError) as error:
        raise CheckpointError(f"{where} can't be used: {COLUMNS!r} {error}") from error
    open_ = Counter(group.batch for group in groups if group.place == "delivered")
    return CheckpointInfo(
        path=str(folder),
        others=[other.name for other in others],
        run=engine.run,
        version=engine.version,
        seed=engine.seed,
        vocab_size=engine.vocab_size,
        batches=engine.batches,
        uncommitted={batch.index: open_[batch.index] for batch in engine.uncommitted},
        turns_in_flight=engine.turns_in_flight,
        size=sum(entry["bytes"] for entry in manifest["files"].values()),
        tasks={
            name: _task(
                task,
                [g for g in groups if g.task == name and g.place != "delivered"],
                columns,
            )
            for name, task in engine.tasks.items()
        },
    )


def _task(
    task: WireTask, groups: Sequence[WireGroup], columns: Mapping[str, ColumnData]
) -> CheckpointTask:
    samples = [sample for group in groups for sample in group.samples]
    lives = [life.journal for group in groups for life in group.lives or ()]
    journals = [j for group in groups for j in (*group.journals, *lives) if j is not None]
    turns = [turn for j in journals for context in j.contexts for _, _, turn in context.turns]
    calls = [call for journal in journals for call in journal.calls]
    partial = sum(turn[0] == "abort" for turn in turns)
    responses = [{number for _, number, _ in sample.segments} for sample in samples]
    versions: Counter[int] = Counter()
    for numbers in responses:
        versions.update({v for number in numbers for v in _versions(columns, number)})
    return CheckpointTask(
        prompts=task.prompts,
        epoch=task.epoch,
        position=task.drawn,
        held=len(task.held),
        ended=task.ended,
        drawn=task.table["drawn"],
        delivered=task.table["delivered"],
        dropped=dict(task.table["dropped"]),
        places=_sorted(group.place for group in groups),
        samples=_sorted(sample.status for sample in samples),
        unjudged=sum(sample.unjudged for sample in samples),
        journals=len(journals),
        turns=len(turns) - partial,
        partial_turns=partial,
        calls=len(calls),
        unknown_calls=sum(call.outcome is None for call in calls),
        tokens=sum(_length(columns, number) for numbers in responses for number in numbers),
        versions=dict(sorted(versions.items())),
    )


def _sorted(words: Iterable[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())


def _span(columns: Mapping[str, ColumnData], name: str, number: int) -> tuple[int, int]:
    stops = cast("array[int]", columns.get(name, array("q")))
    return (stops[number - 1] if number else 0), stops[number]


def _length(columns: Mapping[str, ColumnData], number: int) -> int:
    start, stop = _span(columns, "responses.stops", number)
    return stop - start


def _versions(columns: Mapping[str, ColumnData], number: int) -> set[int]:
    first, last = _span(columns, "responses.runs", number)
    versions = cast("array[int]", columns.get("runs.versions", array("i")))
    return set(versions[first:last]) - {CONTEXT_VERSION}
