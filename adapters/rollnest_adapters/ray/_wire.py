"""What a controller and its actor say to each other; plain records, packed as they travel."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from rollnest import Sampling
from rollnest.abc import Attempt, Capabilities
from rollnest_adapters._checks import whole

__all__ = ["GenerateReply", "GenerateRequest", "PolicyDescription"]


@frozen(kw_only=True)
class GenerateRequest:
    """What an actor's `generate` gets: one attempt.

    Attributes:
        id: The attempt's id, which `abort` names.
        prompt_ids: Exactly what the policy is to continue.
        max_tokens: Most tokens of the answer.
        sampling: How to sample; its own `max_tokens` is not meant.
        affinity: The same for all attempts of one rollout.
        version: The policy's weight version when it was sent.
        serve: The name with which its controller had the policy served; empty for callers that had not.
    """

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int = field(validator=whole(1))
    sampling: Sampling
    affinity: str = ""
    version: int = 0
    serve: str = ""

    @classmethod
    def of(cls, attempt: Attempt, *, serve: str = "") -> GenerateRequest:
        """The request for an attempt."""
        return cls(
            id=attempt.id,
            prompt_ids=_column("i", attempt.prompt_ids),
            max_tokens=attempt.max_tokens,
            sampling=attempt.sampling,
            affinity=attempt.affinity,
            version=attempt.version,
            serve=serve,
        )

    def attempt(self) -> Attempt:
        """An attempt like the one it was made of, with an id of its own."""
        return Attempt(
            self.prompt_ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            affinity=self.affinity,
            version=self.version,
        )


@frozen(kw_only=True)
class GenerateReply:
    """What an actor's `generate` returns; checked when it arrives, like every server's answer.

    Attributes:
        ids: The tokens.
        logprobs: One for each.
        finish_reason: `"stop"`, `"length"` or `"abort"`; an abort brings what there is.
        versions: Weight version of all tokens, or of each; `None` is the request's.
        detail: What else there is to say about the end.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    versions: int | Sequence[int] | None = None
    detail: str | None = None

    @classmethod
    def of(cls, attempt: Attempt) -> GenerateReply:
        """The reply that an attempt holds."""
        received, reason = attempt.received, attempt.finish_reason
        runs = received.version_runs
        return cls(
            ids=_column("i", received.ids),
            logprobs=_column("f", received.logprobs),
            finish_reason="" if reason is None else reason.value,
            versions=runs[0][0] if len(runs) == 1 else _column("i", received.versions),
            detail=attempt.detail,
        )


@frozen(kw_only=True)
class PolicyDescription:
    """What an actor says of the controller that it holds.

    Attributes:
        name: What it is.
        capabilities: What it can do.
        version: The weight version that it reports.
        max_in_flight: Most calls of `generate` that the actor runs at once.
    """

    name: str
    capabilities: Capabilities
    version: int | None
    max_in_flight: int


def _column(kind: str, view: memoryview[Any]) -> array[Any]:
    column: array[Any] = array(kind)
    column.frombytes(view.cast("B"))
    return column
