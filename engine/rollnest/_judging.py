"""Turns completed samples into judged ones.

A judger never stalls the event loop: a sync one runs in a worker thread, within the engine's bound and the
task's limit. Anything but a usable answer makes the sample FAILED with its cause, never reward 0.

A composite judger is resolved once for each group, into a tree whose leaves are asked. The leaves of one sample are
asked one after the other: members are judged side by side anyhow, a failed part spares the others, and no thread has to
be abandoned because a sibling failed. Leaves that judge whole groups come last, once all members completed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any, TypeAlias, cast

from attrs import evolve, field, frozen

from ._context import RolloutServices
from ._gate import Gate, OverLimit
from ._judgers import is_composite, judges_groups
from ._policy import Policy, enter_policy, leave_policy
from ._process_judger import ProcessJudger
from ._processes import Processes
from ._records import Failure, Prompt, Sample, Status, Verdict
from ._slots import Call, Named, Slots
from ._stray import is_stray
from ._tree import Wait
from ._workers import Workers
from .abc import BatchJudger, CompositeJudger, Judger, JudgerLike
from .errors import JudgeError, describe

__all__ = ["GroupJudging", "Judging", "as_score", "as_verdict"]


@frozen(eq=False)
class _Leaf:
    """One judger that is asked; `path` names it within its composites."""

    path: str
    what: str
    function: Callable[[Any], Any]
    is_async: bool
    by_group: bool
    uses_policy: bool
    job: ProcessJudger | None


@frozen(eq=False)
class _Branch:
    """One composite, with what it selected for a prompt."""

    path: str
    composite: CompositeJudger
    parts: Mapping[str, _Leaf | _Branch] = field(repr=False)


_Node: TypeAlias = "_Leaf | _Branch"


class Judging:
    """The judger of one task."""

    def __init__(
        self,
        judger: JudgerLike,
        *,
        gate: Gate,
        slots: Slots,
        workers: Workers,
        processes: Processes,
        limit: float | None,
        policy: RolloutServices,
    ) -> None:
        self._judger = judger
        self._policy = policy
        self._gate = gate
        self._slots = slots
        self._policy_slots = _PolicySlots(slots, gate)
        self._workers = workers
        self._processes = processes
        self._limit = limit

    def of(self, prompt: Prompt) -> GroupJudging:
        """What judges one group of a prompt; a judger that can't say so fails each of its samples."""
        try:
            return GroupJudging(self, _resolve(self._judger, prompt))
        except Exception as error:
            return GroupJudging(self, error)

    async def ask(
        self, leaf: _Leaf, given: Sample | Sequence[Sample], of: Named, by: GroupJudging
    ) -> Any:
        """Asks one judger, within a slot and the limit; returns its answer as it is.

        Raises:
            JudgeError: It took too long, or it is a part of another and raised. One that is none raises its own error.

        Cancellation: an async judger is cancelled; a sync one's thread is abandoned, its process killed.
        """
        policy = Policy(self._policy, of.uid) if leaf.uses_policy else None
        token = enter_policy(policy)
        with _named(leaf.path):
            try:
                return await self._ask(leaf, given, of, by)
            except OverLimit as error:
                raise JudgeError(f"the judger took over {self._limit} s") from error
            except BaseException as error:
                if is_stray(error, in_loop=True):
                    raise JudgeError("the judger cancelled itself") from error
                raise
            finally:
                leave_policy(token)
                self._gate.ended()

    async def _ask(
        self, leaf: _Leaf, given: Sample | Sequence[Sample], of: Named, by: GroupJudging
    ) -> Any:
        limit = self._gate.limit(self._limit)
        slots = self._policy_slots if leaf.uses_policy else self._slots
        call = Call(slots, leaf.what, of, by)
        if leaf.job is not None:
            return await self._processes.run(leaf.job, call, limit, given, patience=self._limit)
        if leaf.is_async:
            async with call:
                with limit:  # waiting for the slot is not judging
                    return await leaf.function(given)
        return await self._workers.run(call, limit, leaf.function, given, patience=self._limit)


@frozen(eq=False)
class _Members:
    """All members of a group, as whom a judger of groups is asked for."""

    first: Sample

    @property
    def uid(self) -> str:
        return self.first.uid.rpartition("/")[0]


class GroupJudging:
    """The judging of one group.

    Attributes:
        by_group: Whether a verdict depends on the siblings: members are judged once all of them completed.
        uses_policy: Whether one of its judgers asks the policy, and so waits while it is paused.
    """

    def __init__(self, judging: Judging, root: _Node | Exception) -> None:
        self._judging = judging
        self._root = root
        self._traceback = root.__traceback__ if isinstance(root, Exception) else None
        leaves = [] if isinstance(root, Exception) else list(_leaves(root))
        self._own = [leaf for leaf in leaves if not leaf.by_group]
        self._shared = [leaf for leaf in leaves if leaf.by_group]
        self._answers: dict[int, dict[_Leaf, Verdict]] = {}
        self.by_group: bool = bool(self._shared)
        self.uses_policy: bool = any(leaf.uses_policy for leaf in leaves)

    async def verdict(self, sample: Sample) -> Verdict:
        """Returns the verdict of a sample that is judged by itself.

        Raises:
            JudgeError: There is none.

        Cancellation: an async judger is cancelled; a sync one's thread is abandoned.
        """
        try:
            return self._combine(sample, await self._ask_own(sample))
        except JudgeError:
            raise
        except Exception as error:
            raise JudgeError(f"the judger raised {describe(error)}") from error

    async def judge(self, sample: Sample) -> Sample:
        """Returns the sample with its verdict, or FAILED with what went wrong.

        If judging is by group, this asks what concerns the sample alone, and returns it without a verdict.

        Cancellation: as `verdict`; the sample stays unjudged.
        """
        try:
            answers = await self._ask_own(sample)
            if not self.by_group:
                return evolve(sample, verdict=self._combine(sample, answers))
        except Exception as error:
            return _failed(sample, error)
        self._answers[sample.index] = answers
        return sample

    async def judge_group(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns all members with their verdicts, or all of them FAILED with what went wrong.

        Args:
            samples: All members, completed, in order. Those kept from an earlier run are judged anew with the others.

        Cancellation: as `verdict`; all stay unjudged.
        """
        try:
            for sample in samples:
                if sample.index not in self._answers:
                    self._answers[sample.index] = await self._ask_own(sample)
            for leaf in self._shared:
                verdicts = await self._ask_shared(leaf, samples)
                for sample, verdict in zip(samples, verdicts, strict=True):
                    self._answers[sample.index][leaf] = verdict
            return [
                evolve(sample, verdict=self._combine(sample, self._answers[sample.index]))
                for sample in samples
            ]
        except Exception as error:
            return [_failed(sample, error) for sample in samples]

    async def _ask_own(self, sample: Sample) -> dict[_Leaf, Verdict]:
        if isinstance(self._root, Exception):
            # Raised for each member, from where it came first: else the traceback would grow with each.
            raise self._root.with_traceback(self._traceback)
        answers: dict[_Leaf, Verdict] = {}
        for leaf in self._own:
            answer = await self._judging.ask(leaf, sample, sample, self)
            with _named(leaf.path):
                answers[leaf] = as_verdict(answer)
        return answers

    async def _ask_shared(self, leaf: _Leaf, samples: Sequence[Sample]) -> list[Verdict]:
        # The judger gets a list of its own: what it does to it changes nothing here.
        answer = await self._judging.ask(leaf, list(samples), _Members(samples[0]), self)
        with _named(leaf.path):
            return _as_verdicts(answer, len(samples))

    def _combine(self, sample: Sample, answers: Mapping[_Leaf, Verdict]) -> Verdict:
        def combine(node: _Node) -> Verdict:
            if isinstance(node, _Leaf):
                return answers[node]
            verdicts = {name: combine(part) for name, part in node.parts.items()}
            with _named(node.path):
                return as_verdict(node.composite.combine(sample, verdicts))

        assert not isinstance(self._root, Exception)
        return combine(self._root)


def as_verdict(answer: object) -> Verdict:
    """Returns a judger's answer as a verdict.

    Takes a `Verdict`, a number, a bool, a numpy or torch scalar, or a mapping with `score` (what else it holds becomes
    the verdict's details).

    Raises:
        JudgeError: It is none of these, or not finite.
    """
    if isinstance(answer, Verdict):
        return answer
    if isinstance(answer, Mapping):
        mapping = cast("Mapping[str, Any]", answer)
        if "score" not in mapping:
            raise JudgeError(f"the judger's mapping has no 'score', only {sorted(mapping)}")
        details = {key: value for key, value in mapping.items() if key != "score"}
        return Verdict(as_score(mapping["score"]), details=details)
    return Verdict(as_score(answer))


def as_score(value: object, said: str = "the judger answered") -> float:
    """Returns a number, a bool, or a numpy or torch scalar as a float.

    Args:
        value: The number.
        said: How the error's message begins.

    Raises:
        JudgeError: It is none of these, or not finite.
    """
    number = value
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        try:
            number = cast("Any", value).item()  # a numpy or torch scalar
        except (ValueError, TypeError, RuntimeError):
            number = None  # more than one element
    if not isinstance(number, bool | int | float):
        raise JudgeError(f"{said} {value!r}, which is no score")
    score = float(number)
    if not math.isfinite(score):
        raise JudgeError(f"{said} {value!r}, a score must be finite")
    return score


def _as_verdicts(answers: Any, count: int) -> list[Verdict]:
    # Something with a length: a generator's body would run here, on the event loop.
    if not isinstance(answers, Sized) or isinstance(answers, str | bytes | Mapping | AbstractSet):
        raise JudgeError(f"batch_judge must answer with a sequence, got {answers!r}")
    listed: list[object] = list(cast("Any", answers))
    if len(listed) != count:
        raise JudgeError(f"batch_judge gave {len(listed)} answers for {count} samples")
    verdicts: list[Verdict] = []
    for index, answer in enumerate(listed):
        try:
            verdicts.append(as_verdict(answer))
        except JudgeError as error:
            raise JudgeError(f"answer {index} of batch_judge: {error}") from error
    return verdicts


def _resolve(judger: JudgerLike, prompt: Prompt, path: str = "") -> _Node:
    if not is_composite(judger):
        return _leaf(judger, path)
    composite = cast("CompositeJudger", judger)
    with _named(path):
        parts = dict(composite.select(prompt))
        if not parts:
            raise JudgeError(f"{composite!r} selects no judger for prompt {prompt.uid!r}")
    return _Branch(
        path,
        composite,
        {
            name: _resolve(part, prompt, f"{path}.{name}" if path else name)
            for name, part in parts.items()
        },
    )


def _leaf(judger: JudgerLike, path: str) -> _Leaf:
    what = f"judger part {path}" if path else "judger"
    if isinstance(judger, ProcessJudger):
        return _Leaf(path, what, judger, False, judger.by_group, judger.uses_policy, judger)
    by_group = judges_groups(judger)
    function: Any = judger
    if by_group:
        function = cast("BatchJudger", judger).batch_judge
    elif isinstance(judger, Judger):
        function = judger.judge
    is_async = iscoroutinefunction(function) or iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    uses_policy: bool = getattr(judger, "uses_policy", False)
    return _Leaf(path, what, function, is_async, by_group, uses_policy, None)


def _leaves(node: _Node) -> Iterator[_Leaf]:
    if isinstance(node, _Leaf):
        yield node
    else:
        for part in node.parts.values():
            yield from _leaves(part)


@contextmanager
def _named(path: str) -> Generator[None]:
    """Says which part of a composite an error came from."""
    try:
        yield
    except Exception as error:
        if not path:
            raise
        told = isinstance(error, JudgeError)
        said = str(error) if told else f"the judger raised {describe(error)}"
        raise JudgeError(f"part {path!r}: {said}") from error


def _failed(sample: Sample, error: BaseException) -> Sample:
    return evolve(sample, status=Status.FAILED, verdict=None, failure=Failure.of("judge", error))


class _PolicySlots(Slots):
    """The judge slots for judgers that use the policy: taken only while the gate is open."""

    policy = True

    def __init__(self, slots: Slots, gate: Gate) -> None:
        super().__init__(slots.size, slots.clock, name=slots.name, instruments=slots.instruments)
        self.calls = slots.calls
        self._slots = slots
        self._gate = gate

    async def acquire(self, patience: float | None = None) -> None:
        while True:
            await self._gate.wait_open()
            await self._slots.acquire(patience)
            if not self._gate.shut:
                return
            self._slots.release()  # a pause began while this one waited for its slot

    def wait(self, seconds: float) -> Wait:
        return self._gate.wait(seconds) if self._gate.closed else self._slots.wait(seconds)

    def release(self) -> None:
        self._slots.release()

    def lose(self) -> None:
        self._slots.lose()

    def regain(self) -> None:
        self._slots.regain()
