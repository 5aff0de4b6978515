"""Finds the checkpoint that an engine goes on from, and checks that it is this engine's.

Names of tasks, prompts, group sizes, shuffling and the seed must be as they were, because positions and visits mean
something else otherwise. Weights of tasks, limits, sampling, strategies, loops and judgers may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ._capture import Visit
from ._checkpoint import Manifest, checkpoints, read_manifest
from ._fingerprint import fingerprint_of
from ._records import Batch
from ._saved import Saved, read_engine, read_saved
from ._task import TaskSpec
from ._wire import WireEngine, WireTask
from .errors import CheckpointError

__all__ = ["Restoration", "Restored", "find", "fit"]


@frozen(kw_only=True)
class Restored:
    """From what an engine was restored, and what that means.

    What was handed over after the checkpoint was saved is not in it: those groups come again, in batches after
    `batches`, under the same task and visit.

    Attributes:
        path: The checkpoint's folder; `None` if it was a `state_dict()`.
        run: Names the run, over all restarts.
        version: The weight version that the engine goes on with.
        saved_version: The one that the checkpoint was saved with.
        batches: Batches that it knows of. The next new one has the number after it.
        again: Of these, those that are handed over again, in this order, with `Batch.again`.
        groups: Groups that it goes on with: ready, waiting, or in flight when it was saved.
        newer: Of these, those that begin anew, because newer weights had made a part of them.
    """

    path: Path | None
    run: str
    version: int
    saved_version: int
    batches: int
    again: tuple[int, ...]
    groups: int
    newer: int


@frozen(eq=False, kw_only=True)
class Restoration:
    """A checkpoint that fits an engine.

    Attributes:
        saved: What it holds; batches that can't be handed over again are among its visits.
        again: Batches that are handed over again.
        report: What the user is told.
    """

    saved: Saved
    again: Sequence[Batch]
    report: Restored

    @property
    def owed(self) -> Mapping[str, Fraction]:
        """What tasks are owed of the next batches."""
        return {name: Fraction(share) for name, share in self.saved.engine.owed.items()}

    def check_vocabulary(self, size: int) -> None:
        """Raises `CheckpointError` if the policy has another vocabulary."""
        known = self.saved.engine.vocab_size
        if size != known:
            raise CheckpointError(
                f"the checkpoint is of a policy with a vocabulary of {known} tokens, and this one has {size}"
            )


def find(directory: str | PathLike[str], trained_through: int | None) -> Path | None:
    """Returns the newest checkpoint from which a trainer can go on that has trained that many batches.

    Args:
        directory: Where an engine saved, or one of its checkpoints.
        trained_through: Number of the last batch that was trained; `None` asks for none.

    Returns:
        Its folder; `None` if there is no checkpoint at all.

    Raises:
        CheckpointError: There are checkpoints, and none fits, or a manifest is damaged.
    """
    path = Path(directory)
    known = checkpoints(path)
    if not known and (path / "manifest.json").exists():
        known = [path]
    if not known:
        return None
    if trained_through is None:
        return known[-1]
    spans: list[str] = []
    for folder in reversed(known):
        first, last = _span(read_manifest(folder))
        if first <= trained_through <= last:
            return folder
        spans.append(f"{folder.name} fits {first} to {last}")
    raise CheckpointError(
        f"no checkpoint in {path} fits trained_through={trained_through}: {'; '.join(spans)}"
    )


def _span(manifest: Manifest) -> tuple[int, int]:
    """After how many trained batches a trainer can go on: what was committed before is gone, and no more is known."""
    batches, open_ = manifest["batches"], set(manifest["uncommitted"])
    committed = [n for n in range(1, batches + 1) if n not in open_]
    return max(committed, default=0), batches


def fit(
    files: Mapping[str, bytes],
    manifest: Manifest,
    specs: Sequence[TaskSpec],
    *,
    seed: int | None,
    trained_through: int | None,
    version: int | None,
    path: Path | None,
) -> Restoration:
    """Reads a checkpoint's files for an engine with these tasks.

    Args:
        files: Its files.
        manifest: Its manifest.
        specs: The tasks.
        seed: The engine's seed, if it has been said.
        trained_through: Number of the last batch that was trained; `None` is as many as were committed.
        version: The weight version to go on with; `None` is the checkpoint's.
        path: Where it is.

    Raises:
        CheckpointError: It is damaged, or is not this engine's, or knows too much or too little of what was trained.
    """
    where = "state" if path is None else f"checkpoint {path}"
    engine = read_engine(files, where)
    if seed is not None and seed != engine.seed:
        raise CheckpointError(f"{where} was saved with seed {engine.seed}, and seed is {seed}")
    if trained_through is not None:
        first, last = _span(manifest)
        if not first <= trained_through <= last:
            raise CheckpointError(
                f"trained_through is {trained_through}, and {where} fits {first} to {last}: batches up to {first} are "
                f"not in it any more, and those after {last} were handed over later"
            )
    _check_tasks(engine, specs, where)
    prompts = {
        s.name: {p.uid: p for p in s.prompts} for s in specs if isinstance(s.prompts, Sequence)
    }
    saved = read_saved(engine, files, prompts, where)
    version = engine.version if version is None else version
    again, back = _to_come_again(saved.batches, trained_through or 0, version)
    batches = back[0].index - 1 if back else engine.batches
    visits = [*_visits(back), *saved.visits]
    saved = evolve(saved, visits=visits)
    report = Restored(
        path=path,
        run=engine.run,
        version=version,
        saved_version=engine.version,
        batches=batches,
        again=tuple(batch.index for batch in again),
        groups=len(visits),
        newer=sum(_is_newer(visit, version) for visit in visits),
    )
    return Restoration(saved=saved, again=again, report=report)


def _to_come_again(
    batches: Sequence[Batch], trained_through: int, version: int
) -> tuple[list[Batch], list[Batch]]:
    """The batches that are handed over again, and those from the first one on that newer weights have made."""
    left = [evolve(batch, again=True) for batch in batches if batch.index > trained_through]
    for number, batch in enumerate(left):
        if any(_is_newer(visit, version) for visit in _visits([batch])):
            return left[:number], left[number:]
    return left, []


def _visits(batches: Sequence[Batch]) -> list[Visit]:
    return [
        Visit(place="delivered", group=group, batch=batch.index)
        for batch in batches
        for group in batch.groups
    ]


def _is_newer(visit: Visit, version: int) -> bool:
    newest = visit.newest_version
    return newest is not None and newest > version


def _check_tasks(engine: WireEngine, specs: Sequence[TaskSpec], where: str) -> None:
    names = [spec.name for spec in specs]
    if sorted(names) != sorted(engine.tasks):
        raise CheckpointError(
            f"{where} is of the tasks {list(engine.tasks)}, and tasks has {names}"
        )
    for spec in specs:
        task = engine.tasks[spec.name]
        for what, was, now in _facts(task, spec):
            if was != now:
                raise CheckpointError(
                    f"{where} does not fit task {spec.name!r}: its {what} was {was!r}, and is {now!r}"
                )


def _facts(task: WireTask, spec: TaskSpec) -> list[tuple[str, Any, Any]]:
    facts: list[tuple[str, Any, Any]] = [("group_size", task.group_size, spec.group_size)]
    if task.prompts is None or not isinstance(spec.prompts, Sequence):
        kinds = ("a PromptSource", "a sequence")
        was, now = kinds[task.prompts is not None], kinds[isinstance(spec.prompts, Sequence)]
        return [*facts, ("prompts", was, now)]
    return [
        *facts,
        ("shuffle", task.shuffle, spec.shuffle),
        ("number of prompts", task.prompts, len(spec.prompts)),
        ("prompts' fingerprint", task.fingerprint, fingerprint_of(spec.prompts)),
    ]
