"""Tools that a policy may call: their schemas, the strict check of arguments, and the parsing of calls.

Whatever the policy writes, reading it never raises: a call that can't be made comes out as a `ToolCall` whose `error`
says why, in words that the policy can be told. There is one such rule, for text that is no JSON, for a tool that
doesn't exist and for arguments that don't fit. Nothing is coerced: `"5"`, `5.7` and `true` are no integers.

Running a tool is left to the loop.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from textwrap import dedent
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Protocol,
    TypeAlias,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
)

from attrs import evolve, frozen
from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError, transform_error
from cattrs.cols import (
    list_structure_factory,
    mapping_structure_factory,  # pyright: ignore[reportUnknownVariableType]
)
from cattrs.gen.typeddicts import (
    make_dict_structure_fn,  # pyright: ignore[reportUnknownVariableType]
)

from ._journal import OnUnknown, ToolReplay, check_tool_options
from ._records import Message, ToolCall

__all__ = ["HermesToolParser", "Tool", "ToolParser", "checked_call"]

_Schema: TypeAlias = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SCALARS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ALLOWED = "str, int, float, bool, list[X], dict[str, X], Literal[...] or X | None"


class Tool:
    """A Python function that the policy may call, sync or async.

    Its parameters need annotations out of `str`, `int`, `float`, `bool`, `list[X]`, `dict[str, X]`, `Literal[...]`
    and `X | None`. The docstring is what the policy reads: all before its first section describes the tool, `Args:`
    describes the parameters.

    Attributes:
        function: What is called.
        name: What the policy calls it; the function's own name by default.
        description: What the policy is told about it; from the docstring by default.
        replay: As in `Rollout.tool`: what a call does when the loop runs again.
        on_unknown: As in `Rollout.tool`: what it does if nobody knows whether it took effect.
    """

    __slots__ = (
        "_parameters",
        "_structure",
        "description",
        "function",
        "name",
        "on_unknown",
        "replay",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        replay: ToolReplay = "recorded",
        on_unknown: OnUnknown = "rerun",
    ) -> None:
        check_tool_options(replay, on_unknown)
        if not callable(function):
            raise TypeError(f"a tool must be a function, got {function!r}")
        if name is None:
            name = str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"a tool's name has 1 to 64 letters, digits, _ or -, got {name!r}; set name="
            )
        self.function: Callable[..., Any] = function
        self.replay: ToolReplay = replay
        self.on_unknown: OnUnknown = on_unknown
        self.name: str = name
        self.description: str = (
            _split_docstring(function)[0] if description is None else description
        )
        try:
            self._parameters = _parameters(function)
        except TypeError as error:
            raise TypeError(f"tool {name!r}: {error}") from error.__cause__
        self._structure = _structure_for(self._parameters)

    def __repr__(self) -> str:
        return f"<Tool {self.name}({', '.join(map(str, self._parameters.values()))})>"

    @property
    def schema(self) -> Message:
        """The tool in the form that chat templates take: OpenAI's function schema."""
        described = _split_docstring(self.function)[1]
        properties: dict[str, _Schema] = {}
        for name, parameter in self._parameters.items():
            properties[name] = _schema(parameter.annotation)
            if name in described:
                properties[name]["description"] = described[name]
            if not _required(parameter):
                properties[name]["default"] = parameter.default
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [name for name, p in self._parameters.items() if _required(p)],
        }
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments as the function takes them by keyword; what has a default may be missing.

        Raises:
            ValueError: They don't fit; the message lists everything that is wrong.
        """
        try:
            return self._structure(arguments)
        except BaseValidationError as error:
            faults = transform_error(error, "arguments", format_exception=_say)
            # cattrs says what is wrong and then where; where comes first with us.
            told = (": ".join(reversed(fault.rsplit(" @ ", 1))) for fault in faults)
            raise ValueError("; ".join(told)) from None


def checked_call(call: ToolCall, tools: Iterable[Tool]) -> ToolCall:
    """Returns a call with its arguments checked, or with the error that says why it can't be made.

    A call that already has an error is returned as it is.
    """
    if call.error is not None:
        return call
    known = {tool.name: tool for tool in tools}
    if call.name not in known:
        names = ", ".join(known) or "none"
        return evolve(call, error=f"there is no tool {call.name!r}; the tools are: {names}")
    try:
        return evolve(call, arguments=known[call.name].check(call.arguments or {}))
    except ValueError as error:
        return evolve(call, error=f"the arguments of {call.name} don't fit: {error}")


class ToolParser(Protocol):
    """Reads the calls out of what the policy wrote."""

    def parse(self, text: str, /) -> Sequence[ToolCall]:
        """Returns the calls in order; whatever looks like one but isn't comes with its `error`. Never raises."""
        ...


@frozen
class HermesToolParser:
    """Reads calls as Hermes and Qwen models write them.

    `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`, any number of them, with any text around.
    """

    def parse(self, text: str, /) -> Sequence[ToolCall]:
        """See `ToolParser.parse`."""
        calls: list[ToolCall] = []
        at = text.find(_OPEN)
        while at >= 0:
            call = _one_call(text, at)
            calls.append(call)
            at = text.find(_OPEN, at + len(call.raw))
        return calls


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _one_call(text: str, at: int) -> ToolCall:
    """Reads the call whose opening tag stands at `at`; its `raw` is all that belongs to it."""
    body = _skip_space(text, at + len(_OPEN))
    try:
        value, end = _DECODER.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raw = text[at : _end_of_call(text, body)]
        return ToolCall("", error=f"the tool call is no valid JSON: {said}", raw=raw)
    end = _skip_space(text, end)
    if text.startswith(_CLOSE, end):
        return _as_call(value, text[at : end + len(_CLOSE)])
    raw = text[at : _end_of_call(text, end)]
    said = "something follows its JSON object" if raw.endswith(_CLOSE) else f"{_CLOSE} is missing"
    return ToolCall(_name_in(value), error=f"the tool call is malformed: {said}", raw=raw)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _end_of_call(text: str, at: int) -> int:
    """Where a call ends that JSON can't tell the end of: after a closing tag, or before another opening one."""
    close, following = text.find(_CLOSE, at), text.find(_OPEN, at)
    if close >= 0 and (following < 0 or close < following):
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)


def _as_call(value: object, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", error="the tool call must be a JSON object", raw=raw)
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall("", error='the tool call needs a "name", a string', raw=raw)
    if not isinstance(arguments, dict):
        return ToolCall(name, error='the tool call needs "arguments", an object', raw=raw)
    unknown = [key for key in call if key not in ("name", "arguments")]
    if unknown:
        said = f"the tool call has unknown keys: {', '.join(unknown)}"
        return ToolCall(name, error=said, raw=raw)
    return ToolCall(name, cast("dict[str, Any]", arguments), raw=raw)


def _name_in(value: object) -> str:
    name = cast("dict[str, Any]", value).get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


# Reading a function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise TypeError(f"an annotation can't be resolved: {error}") from error
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{parameter} can't be given by keyword, as the arguments of a call are"
            )
        if parameter.annotation is parameter.empty:
            raise TypeError(f"parameter {name} needs an annotation")
        try:
            _schema(parameter.annotation)
        except TypeError as error:
            raise TypeError(f"parameter {name} {error}") from None
        if not _required(parameter):
            try:
                _STRICT.structure(parameter.default, parameter.annotation)
            except (BaseValidationError, _MisfitError):
                raise TypeError(
                    f"the default of {name} doesn't fit its annotation, got {parameter.default!r}"
                ) from None
    return parameters


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _schema(annotation: Any) -> _Schema:
    """Returns the JSON schema of an annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None and annotation in (str, int, float, bool):
        return {"type": _SCALARS[annotation]}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if origin is Literal and all(type(value) in (str, int, bool) for value in arguments):
        kinds = {_SCALARS[type(value)] for value in arguments}
        kind: _Schema = {"type": kinds.pop()} if len(kinds) == 1 else {}
        return {**kind, "enum": list(arguments)}
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        (inner,) = (kind for kind in arguments if kind is not NoneType)
        return {"anyOf": [_schema(inner), {"type": "null"}]}
    raise TypeError(f"must be annotated with {_ALLOWED}, got {annotation!r}")


def _split_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Takes a Google docstring apart: what stands before its first section, and what `Args:` says."""
    sections = _SECTION.split(inspect.getdoc(function) or "")
    parameters: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title == "Args":
            entries = _ENTRY.split(dedent(body.strip("\n")))
            for name, said in zip(entries[1::2], entries[2::2], strict=True):
                parameters[name] = " ".join(said.split())
    return sections[0].strip(), parameters


_SECTION = re.compile(
    r"^(Args|Cancellation|Examples?|Notes?|Raises|Returns|Yields):[ ]*$", re.MULTILINE
)
_ENTRY = re.compile(r"^(\w+)(?: *\(.*?\))?:", re.MULTILINE)


# Checking arguments


class _MisfitError(ValueError):
    """A value that is not what its schema says; the message is for the policy."""

    def __init__(self, expected: str, value: object) -> None:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"expected {expected}, got {shown}")


def _structure_for(
    parameters: Mapping[str, inspect.Parameter],
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    annotations = {
        name: p.annotation if _required(p) else NotRequired[p.annotation]
        for name, p in parameters.items()
    }
    keywords = cast("Callable[..., Any]", TypedDict)("Arguments", annotations)
    make = cast("Callable[..., Callable[[Any, Any], Any]]", make_dict_structure_fn)
    hook = make(keywords, _STRICT, _cattrs_forbid_extra_keys=True)

    def structure(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", hook(dict(arguments), keywords))

    return structure


def _strict_converter() -> Converter:
    """Returns a converter that takes JSON values as they are, or not at all."""
    converter = Converter(detailed_validation=True)
    for kind in (str, int, bool):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_factory(
        _is_a(list), partial(_guarded, "array", list, list_structure_factory)
    )
    converter.register_structure_hook_factory(
        _is_a(dict), partial(_guarded, "object", dict, mapping_structure_factory)
    )
    converter.register_structure_hook_func(_is_a(Literal), _one_of)
    return converter


def _is_a(origin: object) -> Callable[[Any], bool]:
    return lambda annotation: get_origin(annotation) == origin


def _exactly(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise _MisfitError(_SCALARS[kind], value)
    return value


def _number(value: Any, _: Any) -> float:
    # JSON has one kind of number: 5 is what one writes for 5.0.
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise _MisfitError("number", value)


def _one_of(value: Any, kind: Any) -> Any:
    if not any(type(value) is type(known) and value == known for known in get_args(kind)):
        raise _MisfitError(f"one of {json.dumps(get_args(kind))}", value)
    return value


def _guarded(
    name: str, kind: type, factory: Callable[..., Any], annotation: Any, converter: Converter
) -> Callable[[Any, Any], Any]:
    # cattrs itself takes any iterable for a list, even a string.
    hook = factory(annotation, converter)

    def structure(value: Any, annotation: Any) -> Any:
        if type(value) is not kind:
            raise _MisfitError(name, value)
        return hook(value, annotation)

    return structure


def _say(error: BaseException, _: object) -> str:
    match error:
        case KeyError():
            return "is missing"
        case ForbiddenExtraKeysError():
            return f"there is no argument {', '.join(map(repr, sorted(error.extra_fields)))}"
        case _:
            return str(error)


_STRICT = _strict_converter()
