"""What several controllers can do together: what each of them can. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from attrs import fields

from rollnest import Sampling
from rollnest.abc import Capabilities, SamplingField

__all__ = ["check_covers", "meet"]

_SAME = ("vocab_size", "logprobs", "stop_token_ids")
"""Servers that differ in these serve another policy, or one whose tokens can't be in one batch."""

_PROMISED = (
    "max_context",
    "sampling",
    "fixed",
    "version_spans",
    "pause_modes",
    "release_tags",
)

_FIELDS: tuple[SamplingField, ...] = get_args(SamplingField)
_DEFAULTS: dict[str, Any] = {a.name: a.default for a in fields(Sampling)}
_VARIES = object()


def meet(known: Mapping[str, Capabilities]) -> Capabilities:
    """Returns what all of them can.

    Args:
        known: By the server's name; at least one.

    Raises:
        ValueError: Two of them don't serve the same policy in the same way; the message names both.
    """
    (first, least), *others = known.items()
    for name, other in others:
        for field in _SAME:
            _check_equal(field, {first: getattr(least, field), name: getattr(other, field)})
        least = Capabilities(
            vocab_size=least.vocab_size,
            max_context=min(least.max_context, other.max_context),
            logprobs=least.logprobs,
            stop_token_ids=least.stop_token_ids,
            sampling=least.sampling & other.sampling,
            fixed=_fixed({first: least, name: other}),
            version_spans=least.version_spans and other.version_spans,
            pause_modes=least.pause_modes & other.pause_modes,
            release_tags=least.release_tags & other.release_tags,
        )
    return least


def check_covers(pool: Capabilities, name: str, server: Capabilities) -> None:
    """Raises unless a server that joins can do what the pool has promised.

    Raises:
        ValueError: It can't; the message says what differs.
    """
    together = meet({"the pool": pool, name: server})
    for field in _PROMISED:
        promised, left = getattr(pool, field), getattr(together, field)
        if promised != left:
            raise ValueError(
                f"server {name!r} can't join: the pool has promised {field} {_shown(promised)}, "
                f"with it {_shown(left)} would be left"
            )


def _fixed(two: Mapping[str, Capabilities]) -> dict[SamplingField, Any]:
    """Fields that at least one of them serves with one value only, if that isn't the default."""
    fixed: dict[SamplingField, Any] = {}
    for field in _FIELDS:
        served = {name: _served(server, field) for name, server in two.items()}
        values = {name: value for name, value in served.items() if value is not _VARIES}
        _check_equal(field, values)
        for value in values.values():
            if value != _DEFAULTS[field]:
                fixed[field] = value
    return fixed


def _served(server: Capabilities, field: SamplingField) -> Any:
    """With which value it serves a field to all attempts, unless each may set it."""
    return _VARIES if field in server.sampling else server.fixed.get(field, _DEFAULTS[field])


def _check_equal(field: str, values: Mapping[str, Any]) -> None:
    if len(values) == 2:
        (first, one), (second, other) = values.items()
        if one != other:
            raise ValueError(
                f"servers {first!r} and {second!r} differ in {field}: {_shown(one)} and {_shown(other)}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        return "{" + ", ".join(sorted(str(getattr(item, "name", item)) for item in items)) + "}"
    return repr(value)
