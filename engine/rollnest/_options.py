"""Options that users set: sampling, capacity, limits. Frozen, checked when they are built.

Seconds are floats; `None` means no limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from attrs import Attribute, field, frozen

from ._checks import check_whole, real, whole

__all__ = ["Capacity", "Limits", "Sampling"]


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
class Limits:
    """How long things may take, in seconds that count only while the gate is open.

    Attributes:
        turn: One turn, over all its attempts.
        tool: One tool call.
        judge: One judger call.
        sample: One sample's agent loop, judging not counted.
    """

    turn: float | None = field(default=None, validator=real(0, open_below=True, optional=True))
    tool: float | None = field(default=60.0, validator=real(0, open_below=True, optional=True))
    judge: float | None = field(default=60.0, validator=real(0, open_below=True, optional=True))
    sample: float | None = field(default=None, validator=real(0, open_below=True, optional=True))
