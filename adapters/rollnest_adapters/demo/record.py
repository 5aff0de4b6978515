"""What a run measured, step by step and in all; everything the closing table, the JSON file and the report show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, field, frozen

from rollnest import Batch, EngineStatistics, Pause, Sample

from .train import Step

__all__ = ["Completion", "Record", "StepRecord", "percentile"]


@frozen
class Completion:
    """One answer of the policy, for people to read."""

    question: str
    text: str
    reward: float
    lag: int


@frozen(kw_only=True)
class StepRecord:
    """One step: a batch, and the pause in which it was trained.

    Attributes:
        reward: Mean reward of the batch.
        lags: How many of its samples had which lag.
        pause_ms: From asking for the pause to a policy at rest.
        turns_in_flight: Turns that the pause interrupted.
        tokens: Tokens of the policy in the batch.
        training: What the trainer did.
        completions: The answers of the batch's first group.
    """

    reward: float
    lags: Mapping[int, int]
    pause_ms: float
    turns_in_flight: int
    tokens: int
    training: Step
    completions: Sequence[Completion]

    @classmethod
    def of(cls, batch: Batch, pause: Pause, training: Step) -> StepRecord:
        """Puts together what a step measured."""
        return cls(
            reward=batch.statistics.reward_mean or 0.0,
            lags=batch.statistics.lag_histogram,
            pause_ms=pause.quiet_seconds * 1e3,
            turns_in_flight=pause.turns_in_flight,
            tokens=batch.statistics.policy_tokens,
            training=training,
            completions=[_completion(s, batch.version) for s in batch.groups[0].samples],
        )


@frozen(kw_only=True)
class Record:
    """One run.

    Attributes:
        options: What was asked for.
        accuracy_before: Share of held-out problems solved greedily, before training.
        accuracy_after: The same, after it.
        steps: What each step measured.
        statistics: Where the engine says all tokens and groups are, at the end.
        controller_committed: Tokens that the controller says it committed: counted apart from the engine.
        controller_late: Tokens that it had for attempts which no longer took any; the engine refused some of them.
        seconds: How long each part took.
    """

    options: Mapping[str, Any]
    accuracy_before: float
    accuracy_after: float
    steps: Sequence[StepRecord] = field(repr=False)
    statistics: EngineStatistics = field(repr=False)
    controller_committed: int
    controller_late: int
    seconds: Mapping[str, float]

    @property
    def lag_histogram(self) -> dict[int, int]:
        """How many delivered samples had which lag."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.lags)
        return dict(sorted(total.items()))

    @property
    def lagging_share(self) -> float:
        """Share of the delivered samples whose lag is at least 1."""
        lags = self.lag_histogram
        return 1 - lags.get(0, 0) / max(1, sum(lags.values()))

    @property
    def tokens_lost(self) -> int:
        """Tokens that the controller committed and that no record of the engine holds or ever took out."""
        held = self.statistics.total("tokens_in_records")
        return self.controller_committed - held - self.statistics.total("tokens_discarded")

    def figures(self) -> dict[str, Any]:
        """Everything as JSON values, by the names of the `--json` file."""
        total = self.statistics.total
        return {
            **self.options,
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "rewards": [step.reward for step in self.steps],
            "pause_ms": [step.pause_ms for step in self.steps],
            "turns_in_flight_at_pause": [step.turns_in_flight for step in self.steps],
            "resumed_turns": total("resumed_turns"),
            "tokens_committed": self.controller_committed,
            "tokens_in_records": total("tokens_in_records"),
            "tokens_expired": total("tokens_expired"),
            "tokens_discarded": total("tokens_discarded"),
            "tokens_lost": self.tokens_lost,
            "tokens_late": self.controller_late,
            "tokens_rejected": total("tokens_rejected"),
            "tokens_unseen": total("unseen_turns"),
            "lag_histogram": {str(lag): count for lag, count in self.lag_histogram.items()},
            "lagging_share": self.lagging_share,
            "groups": {
                "drawn": total("drawn"),
                "delivered": total("delivered"),
                "expired": total("expired"),
                "ready": total("ready"),
                "waiting": total("waiting"),
                "flight": total("flight"),
            },
            "training": [asdict(step.training) for step in self.steps],
            "seconds": sum(self.seconds.values()),
            "seconds_by_part": dict(self.seconds),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile; 0.0 of nothing."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def _completion(sample: Sample, version: int) -> Completion:
    reward = 0.0 if sample.reward is None else sample.reward
    return Completion(sample.prompt.uid, sample.text, reward, sample.lag(version))
