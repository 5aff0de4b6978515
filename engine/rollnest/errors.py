"""Every error rollnest raises on purpose.

    RollnestError
    ├── InferenceError        the policy's server failed a request          (becomes a FAILED sample)
    ├── LoopError             the agent loop broke a rule or raised          (becomes a FAILED sample)
    │   └── ToolError         a tool of the loop raised or timed out
    ├── JudgeError            the judger gave no usable verdict              (becomes a FAILED sample)
    ├── DataError             the prompt can't be used                       (becomes a FAILED sample)
    ├── HostLost              what ran an agent loop is gone; it runs again, from its journal
    ├── UnsupportedSampling   the controller can't honour these sampling parameters
    ├── WeightUpdateFailed    new weights did not load; says what the policy holds now
    ├── PauseFailed           the controller did not confirm a pause; production went on
    ├── EngineBusy            two at once, or not while paused
    ├── EngineClosed          the engine's block was left, or not entered yet
    ├── EngineBroken          the engine can't go on; carries the causes
    ├── EvaluationCancelled   new weights came, and the evaluation was to be cancelled by them
    ├── CheckpointError       a checkpoint can't be written, or is damaged, or another run's or task's
    ├── EndOfPrompts          every task's prompts are used up
    ├── Starved               too many groups in a row were unusable; carries the reasons
    └── Stuck                 groups are missing that can't come; carries the counters

The first five follow the boundary that was crossed. A failed sample is data: it carries the error's
text and never raises. The others reach the caller of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

__all__ = [
    "CheckpointError",
    "DataError",
    "EndOfPrompts",
    "EngineBroken",
    "EngineBusy",
    "EngineClosed",
    "EvaluationCancelled",
    "HostLost",
    "InferenceError",
    "JudgeError",
    "LoopError",
    "PauseFailed",
    "RollnestError",
    "Starved",
    "Stuck",
    "ToolError",
    "UnsupportedSampling",
    "WeightUpdateFailed",
    "WeightsState",
]


class RollnestError(Exception):
    """Base of every error that rollnest raises on purpose. It can be pickled, to be raised in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls the class with the message alone, and some need more.
        return _made_again, (type(self), self.args, dict(self.__dict__))


class InferenceError(RollnestError):
    """The policy's server failed a request, or answered something that can't be used.

    Attributes:
        retryable: Whether the same request may succeed when it is sent again: the server is down or overloaded. The
            engine sends it again, and no sample fails for it unless the server works for others.
        maybe_executed: Whether the server may have generated something for it.
        failover: Whether the server that had it is gone, and another of the policy's takes it over. It is retryable
            then; the engine sends it again at once, and does not take it as a sign that the policy is down.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        maybe_executed: bool = True,
        failover: bool = False,
    ) -> None:
        super().__init__(message)
        self.retryable: bool = retryable or failover
        self.maybe_executed = maybe_executed
        self.failover = failover


class LoopError(RollnestError):
    """An agent loop broke a rule of the `Rollout` handle."""


class ToolError(LoopError):
    """A tool of an agent loop raised or ran out of time."""


class JudgeError(RollnestError):
    """A judger raised, timed out, or answered something that is no verdict."""


class DataError(RollnestError):
    """A prompt can't be used: it is empty, or leaves no room in the context."""


class HostLost(RollnestError):
    """What ran an agent loop, a process or a machine, is gone; the sample has not failed.

    A loop that runs its work elsewhere raises it. The engine runs the loop again, on a rollout that has everything the
    lost one had: turns, results of tools, verdicts. A tool that was running counts as not known to have taken effect.
    A loop that may itself be why fails its sample the fourth time. Out of `generate_group` it cuts the group, which is
    drawn again and run again, as after an eviction.

    Attributes:
        blamed: Whether this loop may be what brought it down.
    """

    def __init__(self, message: str, *, blamed: bool = True) -> None:
        super().__init__(message)
        self.blamed = blamed


class UnsupportedSampling(RollnestError, ValueError):
    """The controller can't honour a sampling parameter; the message names it and its value."""


class WeightsState(Enum):
    """What the policy holds after a failed weight update."""

    OLD = "old"
    NEW = "new"
    UNKNOWN = "unknown"


class WeightUpdateFailed(RollnestError):
    """New weights did not load.

    Attributes:
        weights: What the policy holds now. `OLD` and `NEW` let the engine go on; `UNKNOWN` breaks it.
    """

    def __init__(self, message: str, *, weights: WeightsState) -> None:
        super().__init__(message)
        self.weights = weights


class PauseFailed(RollnestError):
    """The controller did not confirm that it stopped; production goes on with the old weights."""


class EngineBusy(RollnestError):
    """The call can't be served now: another one of its kind is running, or the gate is closed.

    Attributes:
        ready: Groups that are ready now, where a batch was asked for.
        asked: Groups that were asked for, where a batch was asked for.
    """

    def __init__(self, message: str, *, ready: int | None = None, asked: int | None = None) -> None:
        super().__init__(message)
        self.ready = ready
        self.asked = asked


class EngineClosed(RollnestError):
    """The engine's `async with` block is not open."""


class EngineBroken(RollnestError):
    """The engine can't go on; nothing more is produced.

    Attributes:
        causes: The errors that broke it, flat, in the order they were seen.
    """

    def __init__(self, message: str, *, causes: Sequence[BaseException] = ()) -> None:
        super().__init__(message)
        self.causes: tuple[BaseException, ...] = tuple(causes)


class EvaluationCancelled(RollnestError):
    """An evaluation was cancelled by new weights, as its `on_update="cancel"` said.

    There is no part of a result: what ends first are the short answers, so it would mislead.

    Attributes:
        ended: Prompts that had all their samples.
        asked: Prompts of the evaluation.
    """

    def __init__(self, message: str, *, ended: int, asked: int) -> None:
        super().__init__(message)
        self.ended = ended
        self.asked = asked


class CheckpointError(RollnestError):
    """A checkpoint could not be written, or can't be used: it is damaged, foreign, or does not fit.

    Nothing was changed: older checkpoints are whole, and no engine holds half of one.
    """


class EndOfPrompts(RollnestError):
    """Every task's prompts are used up and everything they made was delivered."""


class Starved(RollnestError):
    """Too many groups of a task in a row could not be used.

    Attributes:
        task: The task's name.
        reasons: How many groups of the row were dropped, by reason.
        failures: What the last failure said, by reason; nothing of groups that were filtered or expired.
    """

    def __init__(
        self,
        message: str,
        *,
        task: str,
        reasons: Mapping[str, int],
        failures: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.task = task
        self.reasons: dict[str, int] = dict(reasons)
        self.failures: dict[str, str] = dict(failures or {})


class Stuck(RollnestError):
    """Groups are missing that can't come: none is in flight, and no strategy lets one start.

    Attributes:
        version: The policy's weight version.
        counters: Of each task: groups `lacking`, `ready`, `waiting`, `drawn` and `delivered`, and its `max_staleness`.
    """

    def __init__(
        self, message: str, *, version: int, counters: Mapping[str, Mapping[str, int]]
    ) -> None:
        super().__init__(message)
        self.version: int = version
        self.counters: dict[str, dict[str, int]] = {
            task: dict(figures) for task, figures in counters.items()
        }


def describe(error: BaseException) -> str:
    """Returns an error's type and text, also of one whose text can't be made."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text can't be made: {type(broken).__name__})"
    return f"{name}: {text}" if text else name


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors in an exception group, flat; an error that is no group itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(member)
    else:
        yield error


def _made_again(
    kind: type[RollnestError], args: tuple[Any, ...], state: dict[str, Any]
) -> RollnestError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
