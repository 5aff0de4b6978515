"""An instrument that writes everything down."""

from __future__ import annotations

from rollnest._attempt import Attempt
from rollnest._records import Batch, EvalResult, Group, Sample
from rollnest._tree import StallReport
from rollnest.abc import Instrument

__all__ = ["RecordingInstrument"]


class RecordingInstrument(Instrument):
    """Records every event in order, as a tuple that begins with the hook's name.

    Attributes:
        events: What happened.
        samples: Every sample that ended.
        groups: Every group that ended, with its outcome.
    """

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.samples: list[Sample] = []
        self.groups: list[tuple[Group, str]] = []

    def named(self, hook: str) -> list[tuple[object, ...]]:
        """Returns the arguments of one hook's calls."""
        return [event[1:] for event in self.events if event[0] == hook]

    def group_started(self, task: str, visit: int) -> None:
        """Records it."""
        self.events.append(("group_started", task, visit))

    def group_ended(self, group: Group, outcome: str) -> None:
        """Records it."""
        self.groups.append((group, outcome))
        self.events.append(("group_ended", group.task, group.visit, outcome))

    def turn_started(self, attempt: Attempt) -> None:
        """Records it."""
        self.events.append(("turn_started", attempt.id))

    def turn_ended(self, attempt: Attempt) -> None:
        """Records it."""
        self.events.append(("turn_ended", attempt.id, attempt.finish_reason))

    def tool_started(self, key: str, name: str, again: bool) -> None:
        """Records it."""
        self.events.append(("tool_started", key, name, again))

    def tool_ended(self, key: str, name: str, again: bool) -> None:
        """Records it."""
        self.events.append(("tool_ended", key, name, again))

    def sample_ended(self, sample: Sample) -> None:
        """Records it."""
        self.samples.append(sample)
        self.events.append(("sample_ended", sample.task, sample.visit, sample.index, sample.status))

    def groups_expired(self, task: str, count: int) -> None:
        """Records it."""
        self.events.append(("groups_expired", task, count))

    def judge_started(self, name: str) -> None:
        """Records it."""
        self.events.append(("judge_started", name))

    def judge_ended(self, name: str, seconds: float) -> None:
        """Records it."""
        self.events.append(("judge_ended", name, seconds))

    def slot_lost(self, name: str) -> None:
        """Records it."""
        self.events.append(("slot_lost", name))

    def pause_failed(self, error: Exception) -> None:
        """Records it."""
        self.events.append(("pause_failed", error))

    def weights_updated(self, version: int) -> None:
        """Records it."""
        self.events.append(("weights_updated", version))

    def stalled(self, report: StallReport) -> None:
        """Records it."""
        self.events.append(("stalled", report))

    def loop_lagged(self, seconds: float, where: str) -> None:
        """Records it."""
        self.events.append(("loop_lagged", seconds, where))

    def engine_broken(self, why: str, error: BaseException) -> None:
        """Records it."""
        self.events.append(("engine_broken", why, error))

    def gate_closed(self, in_flight: int) -> None:
        """Records it."""
        self.events.append(("gate_closed", in_flight))

    def paused(self, quiet_seconds: float) -> None:
        """Records it."""
        self.events.append(("paused", quiet_seconds))

    def gate_opened(self, version: int) -> None:
        """Records it."""
        self.events.append(("gate_opened", version))

    def batch_delivered(self, batch: Batch) -> None:
        """Records it."""
        self.events.append(("batch_delivered", batch.index))

    def evaluation_ended(self, result: EvalResult) -> None:
        """Records it."""
        self.events.append(("evaluation_ended", result))

    def outage_began(self, error: Exception) -> None:
        """Records it."""
        self.events.append(("outage_began", str(error)))

    def outage_ended(self, seconds: float) -> None:
        """Records it."""
        self.events.append(("outage_ended", seconds))
