"""What a journal can hold of a tool's results: JSON values and bytes, and whatever has a codec. Pure.

A result is encoded when it comes, which also is a copy: what the loop does to it afterwards doesn't reach the record.
Types are taken exactly, since a loop that is run again must get what it got before.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from inspect import get_annotations
from typing import Any, TypeAlias, TypeVar, cast

from attrs import frozen

from .errors import LoopError

__all__ = [
    "Coded",
    "Plain",
    "decode",
    "encode",
    "fingerprint",
    "is_plain",
    "register_codec",
    "same",
    "unrecordable_return",
]

T = TypeVar("T")


@frozen
class Coded:
    """A value of a type that has a codec."""

    name: str
    value: Plain


Plain: TypeAlias = (
    "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | Coded | None"
)
"""What a journal holds: JSON values, bytes, and coded values made of them."""

_SCALARS = (type(None), bool, int, float, str, bytes)


@frozen
class _Codec:
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_BY_TYPE: dict[type, _Codec] = {}
_BY_NAME: dict[str, _Codec] = {}


def register_codec(
    kind: type[T],
    *,
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    name: str | None = None,
) -> None:
    """Says how journals keep results of a type that is neither a JSON value nor bytes.

        register_codec(complex, encode=lambda z: [z.real, z.imag], decode=lambda pair: complex(*pair))

    It holds for the whole process, and for objects of exactly this type. Tuples have one already.

    Args:
        kind: The type.
        encode: Returns what to keep of an object: JSON values, bytes, or anything that has a codec. It is asked about a
            tool's arguments too, since they tell its calls apart. If it raises, `rollout.tool` raises a `LoopError`:
            before the call for an argument, after it for a result.
        decode: Makes an equal object of it.
        name: What it is kept under; the type's module and name by default. Keep it when you move the type.

    Raises:
        TypeError: An argument has the wrong type, or the type needs no codec.
        ValueError: The type or the name has another codec already.
    """
    if not isinstance(kind, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"kind must be a type, got {kind!r}")
    if kind in (*_SCALARS, list, dict):
        raise TypeError(f"kind needs no codec: journals keep {kind.__name__} as it is")
    for argument, function in (("encode", encode), ("decode", decode)):
        if not callable(function):
            raise TypeError(f"{argument} must be a function, got {function!r}")
    codec = _Codec(name or _name(kind), encode, decode)
    for known in (_BY_TYPE.get(kind), _BY_NAME.get(codec.name)):
        if known is not None and known != codec:
            raise ValueError(f"kind {_name(kind)} has a codec already, or {codec.name!r} is taken")
    _BY_TYPE[kind] = _BY_NAME[codec.name] = codec


def encode(value: object, said: str) -> Plain:
    """Returns a copy of a value as a journal holds it.

    Args:
        value: The value.
        said: How the error's message begins.

    Raises:
        LoopError: There is no way to hold it; names the type, and what to do.
    """
    try:
        return _encode(value)
    except _Unrecordable as error:
        raise LoopError(
            f"{said} {error.what}, which a journal can't hold; return JSON values or bytes, "
            f"or tell rollnest how with register_codec()"
        ) from error.__cause__
    except RecursionError:
        raise LoopError(f"{said} a value that is nested too deeply for a journal") from None


def decode(plain: Plain) -> Any:
    """Returns a new value, equal to the one that was encoded.

    Raises:
        LoopError: Its codec isn't registered any more, or fails.
    """
    if isinstance(plain, list):
        return [decode(item) for item in plain]
    if isinstance(plain, dict):
        return {key: decode(item) for key, item in plain.items()}
    if not isinstance(plain, Coded):
        return plain
    if plain.name not in _BY_NAME:
        raise LoopError(f"a journal holds a {plain.name}, and nothing is registered for it")
    try:
        return _BY_NAME[plain.name].decode(decode(plain.value))
    except Exception as error:
        raise LoopError(f"the codec of {plain.name} can't decode what it encoded") from error


def is_plain(value: object) -> bool:
    """Whether it is what `encode` returns."""
    if isinstance(value, list):
        return all(map(is_plain, cast("list[object]", value)))
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return all(type(key) is str and is_plain(item) for key, item in items)
    if isinstance(value, Coded):
        return is_plain(value.value)
    return type(value) in _SCALARS


def same(one: Plain, other: Plain) -> bool:
    """Whether two values are the same, with their types: 1, 1.0 and true differ, NaN is NaN."""
    return _canonical(one) == _canonical(other)


def fingerprint(arguments: Sequence[object], said: str) -> str:
    """Returns 16 hex digits that tell a call's arguments apart.

    Of what a journal can't hold, the type alone counts.

    Args:
        arguments: What it is called with.
        said: How the error's message begins.

    Raises:
        LoopError: A codec failed. By its type alone, the argument would be taken for another, and the call be given
            another call's result.
    """
    try:
        text = "\n".join([_canonical(argument) for argument in arguments])
    except _Unrecordable as error:
        raise LoopError(f"{said} {error.what}") from error.__cause__
    return blake2b(text.encode(), digest_size=8).hexdigest()


def unrecordable_return(function: Callable[..., object]) -> str | None:
    """Returns the type that a function says it returns, if no journal can hold any object of it."""
    try:
        annotation = get_annotations(function, eval_str=True).get("return", object)
    except Exception:
        return None  # no function, or names that can't be resolved: known once it has returned
    kind: type[object] = annotation
    if annotation in (None, Any) or not isinstance(annotation, type):
        return None
    try:
        holds = any(issubclass(kind, annotation) for kind in (*_SCALARS, list, dict, *_BY_TYPE))
        if holds or issubclass(annotation, Awaitable):
            return None
    except TypeError:  # a protocol that can't be asked
        return None
    return _name(kind)


class _Unrecordable(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def _encode(value: object) -> Plain:
    kind = type(value)
    if kind in _SCALARS:
        return cast("Plain", value)
    if kind is list:
        return [_encode(item) for item in cast("list[object]", value)]
    if kind is dict:
        items = cast("dict[object, object]", value).items()
        for key, _ in items:
            if type(key) is not str:
                raise _Unrecordable(f"a dict with the key {key!r}")
        return {cast("str", key): _encode(item) for key, item in items}
    codec = _BY_TYPE.get(kind)
    if codec is None:
        raise _Unrecordable(f"a {_name(kind)}")
    return Coded(codec.name, _encode(_coded(codec, value)))


def _coded(codec: _Codec, value: object) -> object:
    try:
        return codec.encode(value)
    except Exception as error:
        raise _Unrecordable(f"a {_name(type(value))} that its codec can't encode") from error


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_described)
    except (TypeError, ValueError, RecursionError):
        return _name(type(value))


def _described(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Coded):
        return {value.name: value.value}
    codec = _BY_TYPE.get(type(value))
    if codec is not None:
        return {codec.name: _coded(codec, value)}
    return {"type": _name(type(value))}


def _name(kind: type) -> str:
    return (
        kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    )


def _tuple(items: list[object]) -> tuple[object, ...]:
    return tuple(items)


register_codec(tuple, encode=list[object], decode=_tuple, name="tuple")
