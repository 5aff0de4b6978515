"""The records of a checkpoint as JSON: one class for each, taken apart and put together by cattrs.

Token columns are not in them: a record holds the numbers of its columns. What users may put in (results of tools,
details of verdicts, prompts of a source) is held as a journal holds it, with bytes and coded values marked.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar, cast

from attrs import field, fields, frozen
from cattrs import Converter

from ._capture import Place
from ._codecs import Coded, Plain
from ._options import Sampling
from ._records import BatchStatistics

__all__ = [
    "Json",
    "WireBatch",
    "WireCall",
    "WireContext",
    "WireEngine",
    "WireGroup",
    "WireJournal",
    "WireLife",
    "WirePrompt",
    "WireSample",
    "WireTask",
    "WireTurn",
    "WireVerdict",
    "from_json",
    "read",
    "text",
    "to_json",
]

T = TypeVar("T")

Json: TypeAlias = Any
"""What the json module reads and writes."""

WireTurn: TypeAlias = tuple[str, str | None, int, int, int, int]
"""A turn: finish reason, text, segment, start, stop, attempts."""

WireSegment: TypeAlias = tuple[int, int, int]
"""A segment: number of its prompt's ids, number of its response, `trained_from`."""


@frozen(kw_only=True)
class WireVerdict:
    """A verdict."""

    score: float
    parts: dict[str, float] = field(factory=dict[str, float])
    details: Json = None


@frozen(kw_only=True)
class WireFailure:
    """A failure."""

    kind: str
    message: str
    traceback: str = ""


@frozen(kw_only=True)
class WireSample:
    """A sample; task, prompt and visit are its group's."""

    index: int
    status: str
    segments: list[WireSegment] = field(factory=list[WireSegment])
    turns: list[WireTurn] = field(factory=list[WireTurn])
    finish_reason: str | None = None
    verdict: WireVerdict | None = None
    failure: WireFailure | None = None
    unjudged: bool = False
    sampling: int | None = None
    logprobs_mode: str = "processed"
    generate_seconds: float = 0.0


@frozen(kw_only=True)
class WireRequest:
    """What a loop said of a turn."""

    sampling: int | None = None
    max_tokens: int | None = None


@frozen(kw_only=True)
class WireContext:
    """A recorded context; of each turn its number, what was said of it if anything was, and the turn."""

    prompt: int
    response: int
    turns: list[tuple[int, WireRequest | None, WireTurn]]


@frozen(kw_only=True)
class WireCall:
    """A recorded call; its outcome is a list of a word and what it returned, raised or judged."""

    begun: int
    strand: int
    kind: str
    name: str
    given: str
    outcome: Json = None


@frozen(kw_only=True)
class WireJournal:
    """A journal."""

    index: int
    seed: int
    attempts: int
    place: int = 0
    contexts: list[WireContext] = field(factory=list[WireContext])
    calls: list[WireCall] = field(factory=list[WireCall])


@frozen(kw_only=True)
class WireLife:
    """A member that a group loop comes by again; without a sample, the one with this index in the group."""

    index: int
    place: int = 0
    sample: WireSample | None = None
    journal: WireJournal | None = None
    left: str | None = None
    told: bool = False


@frozen(kw_only=True)
class WireGroup:
    """One visit of a prompt; the prompt is its uid, or its number among those that are in the checkpoint."""

    task: str
    prompt: Json
    visit: int
    place: Place
    samples: list[WireSample]
    journals: list[WireJournal] = field(factory=list[WireJournal])
    seconds: float = 0.0
    expiries: int = 0
    in_tail: bool = False
    restart: str | None = None
    batch: int | None = None
    counted: list[int] = field(factory=list[int])
    left: list[tuple[str, int]] = field(factory=list[tuple[str, int]])
    discarded: int = 0
    unseen: int = 0
    restarted: int = 0
    places: list[tuple[int, int]] = field(factory=list[tuple[int, int]])
    failures: list[tuple[int, str, int]] = field(factory=list[tuple[int, str, int]])
    gone: list[int] = field(factory=list[int])
    lives: list[WireLife] | None = None
    judged: list[list[WireSample]] = field(factory=list[list[WireSample]])


@frozen(kw_only=True)
class WirePrompt:
    """A prompt of a source."""

    uid: str
    messages: Json = None
    token_ids: list[int] | None = None
    label: Json = None
    data_source: str | None = None
    tools: Json = None
    media: Json = None
    meta: Json = None


@frozen(kw_only=True)
class WireBatch:
    """A batch that is not committed; its groups are those that name it."""

    index: int
    version: int
    short: bool
    statistics: BatchStatistics
    tasks: dict[str, BatchStatistics]


@frozen(kw_only=True)
class WireTask:
    """One task: what it must be again, where its prompts are, and its counters."""

    group_size: int
    shuffle: bool
    prompts: int | None
    fingerprint: str | None
    epoch: int = 0
    drawn: int = 0
    source: Json = None
    held: list[int] = field(factory=list[int])
    ended: bool = False
    table: dict[str, Json]
    tokens: dict[str, int]
    produced: dict[str, float]


@frozen(kw_only=True)
class WireEngine:
    """The engine."""

    run: str
    version: int
    seed: int
    start_paused: bool
    vocab_size: int
    turns_in_flight: int
    batches: int
    taken: tuple[int, int]
    owed: dict[str, str]
    samplings: list[Sampling]
    uncommitted: list[WireBatch]
    tasks: dict[str, WireTask]


def text(record: object) -> bytes:
    """Returns a record as one line of JSON."""
    return json.dumps(_converter.unstructure(record), separators=(",", ":")).encode() + b"\n"


def read(line: bytes | str, kind: type[T]) -> T:
    """Makes a record of a line of JSON.

    Raises:
        ValueError: It is none.
        Exception: cattrs' own, which name the field.
    """
    return _converter.structure(json.loads(line), kind)


def to_json(value: Plain) -> Json:
    """Returns a plain value as JSON; what JSON has no form for is marked."""
    if isinstance(value, bytes):
        return {"$bytes": b64encode(value).decode()}
    if isinstance(value, Coded):
        return {"$coded": [value.name, to_json(value.value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        if any(key.startswith("$") for key in value):
            return {"$dict": [[key, to_json(item)] for key, item in value.items()]}
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(value: Json) -> Plain:
    """Returns the plain value that `to_json` was given.

    Raises:
        ValueError: It is marked as nothing that is known.
    """
    if isinstance(value, list):
        return [from_json(item) for item in cast("list[Json]", value)]  # type: ignore[redundant-cast]
    if not isinstance(value, dict):
        return cast("Plain", value)
    given = cast("dict[str, Json]", value)
    if not any(key.startswith("$") for key in given):
        return {key: from_json(item) for key, item in given.items()}
    ((mark, inner),) = given.items()
    match mark:
        case "$bytes":
            return b64decode(inner, validate=True)
        case "$float":
            return float(inner)
        case "$coded":
            name, coded = inner
            return Coded(str(name), from_json(coded))
        case "$dict":
            return {str(key): from_json(item) for key, item in inner}
        case _:
            raise ValueError(f"a value is marked as {mark!r}")


_converter = Converter(forbid_extra_keys=True, omit_if_default=True)


def _as_it_is(value: Any, _: Any) -> Any:
    return value


def _unstructure_sampling(sampling: Sampling) -> Mapping[str, Any]:
    return {a.name: getattr(sampling, a.name) for a in fields(Sampling)}


def _structure_sampling(value: Mapping[str, Any], _: Any) -> Sampling:
    return Sampling(**value)


_converter.register_unstructure_hook(Sampling, _unstructure_sampling)
_converter.register_structure_hook(Sampling, _structure_sampling)
_converter.register_structure_hook_func(lambda kind: kind is Any, _as_it_is)
