"""Options that users set: sampling, capacity, limits. Frozen, checked when they are built.

Seconds are floats; `None` means no limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import in_

from ._checks import check_whole, real, whole

__all__ = ["Capacity", "FailurePolicy", "Limits", "Sampling"]


def _strings(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


def _is_seed(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and value != "derived":
        check_whole(attribute.name, value, 0)


def _are_strings(_: Any, attribute: Attribute[Any], value: Any) -> None:
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"{attribute.name} must hold strings, got {item!r}")
        if not item:
            raise ValueError(f"{attribute.name} must not hold an empty string, got {value!r}")


def _are_ids(_: Any, attribute: Attribute[Any], value: Any) -> None:
    for item in value:
        check_whole(f"an item of {attribute.name}", item, 0)


@frozen
class Sampling:
    """How the policy samples one turn.

    Attributes:
        max_tokens: Most tokens one turn may sample, over all its attempts.
        min_tokens: Fewest tokens a turn samples before it may stop.
        temperature: Divides the logits; 0 is greedy, which training tasks refuse.
        top_p: Nucleus sampling's mass, in (0, 1]; 1 is off.
        top_k: Sample among the k likeliest tokens; `None` is off.
        min_p: Least probability relative to the likeliest token, in [0, 1]; `None` is off.
        stop: Strings that end the turn once the text holds one; needs a tokenizer.
        stop_token_ids: Token ids that end the turn, besides the model's own.
        seed: `None` leaves the server's randomness alone; an int or `"derived"` (from the engine's seed) gives
            every attempt of every sample a seed of its own, derived from it.
    """

    max_tokens: int = field(validator=whole(1))
    min_tokens: int = field(default=0, kw_only=True, validator=whole(0))
    temperature: float = field(default=1.0, kw_only=True, validator=real(0))
    top_p: float = field(default=1.0, kw_only=True, validator=real(0, 1, open_below=True))
    top_k: int | None = field(default=None, kw_only=True, validator=whole(1, optional=True))
    min_p: float | None = field(default=None, kw_only=True, validator=real(0, 1, optional=True))
    stop: tuple[str, ...] = field(
        default=(), kw_only=True, converter=_strings, validator=_are_strings
    )
    stop_token_ids: tuple[int, ...] = field(
        default=(), kw_only=True, converter=_ids, validator=_are_ids
    )
    seed: int | Literal["derived"] | None = field(default=None, kw_only=True, validator=_is_seed)

    def __attrs_post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be <= max_tokens, got {self.min_tokens} > {self.max_tokens}"
            )


@frozen(kw_only=True)
class Capacity:
    """How much runs at once. `None` means no bound of its own.

    Attributes:
        turns: Turns at the policy's server.
        groups: Groups in flight, over all tasks; their strategies may allow fewer. What a waiting `next_batch` lacks
            comes first, then tasks take turns by their weights.
        judges: Judger calls.
        tools: Tool calls.
    """

    turns: int | None = field(default=512, validator=whole(1, optional=True))
    groups: int | None = field(default=None, validator=whole(1, optional=True))
    judges: int | None = field(default=32, validator=whole(1, optional=True))
    tools: int | None = field(default=64, validator=whole(1, optional=True))


@frozen(kw_only=True)
class FailurePolicy:
    """What a dead member does to its group: one whose loop, tool, judger or request failed.

    A spare member of `TaskSpec(redundancy=)` makes up for a dead one before anything else. A prompt that can't be used
    fails all members alike, and is never retried.

    Attributes:
        on_dead_member: `"drop"` lets the group go; members that still generate are cancelled, for nothing could come
            of them. `"retry"` runs the member again, fresh, with seeds of its own; a judger that failed is asked again
            about the same answer. `"shrink"` goes on without it.
        retries: How often `"retry"` runs each member again for each kind of failure.
        min_members: Fewest members that make a group when the dead have left it. `None` is 2 (1 for groups of one) with
            `"shrink"`; with `"retry"`, where it may be given too, the group is dropped once a retry has failed.
        max_failures_in_a_row: After that many failures of the task without a sample that completed the engine breaks,
            with the last of them as causes; `None` is never.
    """

    on_dead_member: Literal["drop", "retry", "shrink"] = field(
        default="drop", validator=in_(("drop", "retry", "shrink"))
    )
    retries: int = field(default=1, validator=whole(0))
    min_members: int | None = field(default=None, validator=whole(1, optional=True))
    max_failures_in_a_row: int | None = field(default=100, validator=whole(1, optional=True))

    def __attrs_post_init__(self) -> None:
        if self.min_members is not None and self.on_dead_member == "drop":
            raise ValueError(
                "min_members is for on_dead_member='shrink' and 'retry', "
                f"got {self.min_members} with 'drop'"
            )

    def least(self, group_size: int) -> int:
        """Returns how many members make a group of this size at least."""
        if self.min_members is not None:
            return self.min_members
        return min(2, group_size) if self.on_dead_member == "shrink" else group_size


@frozen(kw_only=True)
class Limits:
    """How long things may take, in seconds that count only while the gate is open.

    Attributes:
        turn: One turn, over all its attempts.
        tool: One tool call.
        judge: One judger call.
        sample: One sample's agent loop, judging not counted. One that runs again after an eviction has all of it again.
        group: Generating one group: a group loop from its start to its end, with the judging that it asks for itself.
            Of other loops it bounds each member, over all its tries.
        on_timeout: What is over a limit of turn, sample or group `"fail"`s; or it is to `"finish"` with what it has: a
            turn as `"timeout"`, a sample as completed, judged, with the finish reason `"timeout"`. What has not a token
            fails all the same. From a server that sends a turn's tokens at its end only, a turn that is cut has none.
    """

    turn: float | None = field(default=None, validator=real(0, open_below=True, optional=True))
    tool: float | None = field(default=60.0, validator=real(0, open_below=True, optional=True))
    judge: float | None = field(default=60.0, validator=real(0, open_below=True, optional=True))
    sample: float | None = field(default=None, validator=real(0, open_below=True, optional=True))
    group: float | None = field(default=None, validator=real(0, open_below=True, optional=True))
    on_timeout: Literal["fail", "finish"] = field(default="fail", validator=in_(("fail", "finish")))
