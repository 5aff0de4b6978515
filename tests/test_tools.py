"""Tools: schemas read off functions, arguments checked without coercion, calls parsed without raising."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import ToolCall
from rollnest._tools import HermesToolParser, Tool, checked_call

from .helpers import one_name

quick = settings(max_examples=50, deadline=None)


def search(
    query: str,
    limit: int = 10,
    weight: float = 1.0,
    exact: bool = False,
    tags: list[str] | None = None,
    filters: dict[str, list[int]] = {},  # noqa: B006
    order: Literal["new", "old"] = "new",
) -> str:
    """Searches the library.

    Finds at most `limit` entries.

    Args:
        query: What to look for,
            in words.
        limit (int): Most entries.
        order: Which first: new or old.

    Returns:
        The entries.
    """
    return f"{query} {limit} {weight} {exact} {tags} {filters} {order}"


SEARCH = Tool(search)


def test_the_schema_is_openais_function_format() -> None:
    assert SEARCH.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the library.\n\nFinds at most `limit` entries.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in words."},
                    "limit": {"type": "integer", "description": "Most entries.", "default": 10},
                    "weight": {"type": "number", "default": 1.0},
                    "exact": {"type": "boolean", "default": False},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                    },
                    "filters": {
                        "type": "object",
                        "additionalProperties": {"type": "array", "items": {"type": "integer"}},
                        "default": {},
                    },
                    "order": {
                        "type": "string",
                        "enum": ["new", "old"],
                        "default": "new",
                        "description": "Which first: new or old.",
                    },
                },
                "required": ["query"],
            },
        },
    }
    json.dumps(SEARCH.schema)


async def ping() -> str:
    return "pong"


class Shelf:
    def put(self, book: str, *, at: int | None = None) -> None:
        """Puts a book on the shelf."""

    def __call__(self, book: str) -> str:
        """Takes a book."""
        return book


def test_async_functions_methods_objects_and_partials_are_tools() -> None:
    assert Tool(ping).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {},
        "required": [],
    }
    put = Tool(Shelf().put)
    assert (put.name, put.description) == ("put", "Puts a book on the shelf.")
    assert put.check({"book": "a", "at": 3}) == {"book": "a", "at": 3}
    assert Tool(Shelf()).name == "Shelf"
    assert Tool(partial(search, limit=3), name="few").check({"query": "a"}) == {"query": "a"}


def test_a_tool_shows_its_signature() -> None:
    assert repr(Tool(Shelf().put)) == "<Tool put(book: str, at: int | None = None)>"


def test_name_and_description_can_be_given() -> None:
    tool = Tool(search, name="find-it", description="Finds it.")
    assert tool.schema["function"]["name"] == "find-it"
    assert tool.schema["function"]["description"] == "Finds it."
    assert tool.check({"query": "a"}) == {"query": "a"}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (
            list[list[float]],
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        ),
        (None | str, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ],
    ids=one_name,
)
def test_annotations_become_json_schemas(annotation: Any, schema: dict[str, Any]) -> None:
    def tool(x: Any) -> None: ...

    tool.__annotations__["x"] = annotation
    assert Tool(tool).schema["function"]["parameters"]["properties"] == {"x": schema}


# What can be no tool


def takes_anything(x: Any) -> None: ...
def takes_either(x: int | str) -> None: ...
def takes_a_bare_list(x: list) -> None: ...  # type: ignore[type-arg]
def takes_int_keys(x: dict[int, str]) -> None: ...
def takes_none_literal(x: Literal["a", None]) -> None: ...
def takes_the_unannotated(x) -> None: ...  # type: ignore[no-untyped-def]
def takes_positional(x: int, /) -> None: ...
def takes_many(*x: int) -> None: ...
def takes_keywords(**x: int) -> None: ...
def takes_the_unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def has_a_wrong_default(x: int = "5") -> None: ...  # type: ignore[assignment]
def has_a_none_default(x: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_anything, r"'takes_anything': parameter x must be annotated with str, int, .*Any"),
        (takes_either, r"parameter x must be annotated"),
        (takes_a_bare_list, r"parameter x must be annotated"),
        (takes_int_keys, r"parameter x must be annotated"),
        (takes_none_literal, r"parameter x must be annotated"),
        (takes_the_unannotated, r"parameter x needs an annotation"),
        (takes_positional, r"x: int can't be given by keyword"),
        (takes_many, r"\*x: int can't be given by keyword"),
        (takes_keywords, r"\*\*x: int can't be given by keyword"),
        (takes_the_unknown, r"an annotation can't be resolved: name 'Nowhere'"),
        (has_a_wrong_default, r"the default of x doesn't fit its annotation, got '5'"),
        (has_a_none_default, r"the default of x doesn't fit its annotation, got None"),
        ("search", r"a tool must be a function, got 'search'"),
    ],
    ids=one_name,
)
def test_functions_that_can_be_no_tool_are_refused(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Tool(function)


def test_a_function_without_a_usable_name_needs_one() -> None:
    with pytest.raises(ValueError, match="got '<lambda>'; set name="):
        Tool(lambda: 1)
    with pytest.raises(ValueError, match="a tool's name has 1 to 64"):
        Tool(search, name="a b")
    assert Tool(lambda: 1, name="one").name == "one"


# Checking arguments


def test_arguments_that_fit_are_taken_as_they_are() -> None:
    arguments: dict[str, Any] = {
        "query": "5",
        "limit": 0,
        "exact": True,
        "tags": ["a"],
        "filters": {"year": [1, 2]},
        "order": "old",
    }
    assert SEARCH.check(arguments) == arguments
    assert SEARCH.check({"query": "", "tags": None}) == {"query": "", "tags": None}


def test_a_whole_number_is_a_number() -> None:
    checked = SEARCH.check({"query": "a", "weight": 2})
    assert checked["weight"] == 2.0
    assert type(checked["weight"]) is float


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "arguments.query: is missing"),
        ({"query": "a", "limit": "5"}, 'arguments.limit: expected integer, got "5"'),
        ({"query": "a", "limit": 5.7}, "arguments.limit: expected integer, got 5.7"),
        ({"query": "a", "limit": 5.0}, "arguments.limit: expected integer, got 5.0"),
        ({"query": "a", "limit": True}, "arguments.limit: expected integer, got true"),
        ({"query": "a", "limit": None}, "arguments.limit: expected integer, got null"),
        ({"query": 5}, "arguments.query: expected string, got 5"),
        ({"query": "a", "weight": "1.0"}, 'arguments.weight: expected number, got "1.0"'),
        ({"query": "a", "weight": False}, "arguments.weight: expected number, got false"),
        ({"query": "a", "weight": float("inf")}, "arguments.weight: expected number, got Infinity"),
        ({"query": "a", "exact": 1}, "arguments.exact: expected boolean, got 1"),
        ({"query": "a", "tags": "abc"}, 'arguments.tags: expected array, got "abc"'),
        ({"query": "a", "tags": ["a", 1]}, "arguments.tags[1]: expected string, got 1"),
        ({"query": "a", "filters": []}, "arguments.filters: expected object, got []"),
        (
            {"query": "a", "filters": {"y": [1, "2"]}},
            "arguments.filters['y'][1]: expected integer, got \"2\"",
        ),
        (
            {"query": "a", "order": "best"},
            'arguments.order: expected one of ["new", "old"], got "best"',
        ),
        ({"query": "a", "max": 1}, "arguments: there is no argument 'max'"),
        (
            {"limit": "5", "max": 1},
            "arguments.query: is missing; "
            'arguments.limit: expected integer, got "5"; '
            "arguments: there is no argument 'max'",
        ),
    ],
    ids=one_name,
)
def test_arguments_that_do_not_fit_are_named_all_at_once(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^arguments") as caught:
        SEARCH.check(arguments)
    assert str(caught.value) == message


def test_true_is_not_the_literal_one() -> None:
    def tool(x: Literal[1]) -> None: ...

    assert Tool(tool).check({"x": 1}) == {"x": 1}
    with pytest.raises(ValueError, match=r"expected one of \[1\], got true"):
        Tool(tool).check({"x": True})


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ValueError, match=r"expected integer, got \"a{76}\.\.\.$"):
        SEARCH.check({"query": "q", "limit": "a" * 10_000})


# Parsing

PARSER = HermesToolParser()


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_calls_come_out_in_order_with_the_text_they_were_read_from() -> None:
    one = tagged('{"name": "add", "arguments": {"a": 1, "b": [2, null]}}')
    two = tagged('\n{"arguments": {}, "name": "ping"}\n')
    assert PARSER.parse(f"Let me see. {one} and\n{two}\n") == [
        ToolCall("add", {"a": 1, "b": [2, None]}, raw=one),
        ToolCall("ping", {}, raw=two),
    ]


def test_the_closing_tag_inside_a_string_ends_nothing() -> None:
    text = tagged('{"name": "echo", "arguments": {"text": "</tool_call><tool_call>"}}')
    assert PARSER.parse(text) == [ToolCall("echo", {"text": "</tool_call><tool_call>"}, raw=text)]


@pytest.mark.parametrize("text", ["", "no call", "</tool_call>", "<tool_cal>", '{"name": "add"}'])
def test_text_without_a_call_has_none(text: str) -> None:
    assert PARSER.parse(text) == []


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ('{"name": "add", "arguments": {"a":', "", "the tool call is no valid JSON"),
        ("", "", "the tool call is no valid JSON"),
        ("add(1, 2)", "", "the tool call is no valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "", "NaN is no JSON number"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "", "the key 'a' is there twice"),
        ("[1]", "", "the tool call must be a JSON object"),
        ('"add"', "", "the tool call must be a JSON object"),
        ('{"arguments": {}}', "", 'the tool call needs a "name", a string'),
        ('{"name": 5, "arguments": {}}', "", 'the tool call needs a "name", a string'),
        ('{"name": "add"}', "add", 'the tool call needs "arguments", an object'),
        ('{"name": "add", "arguments": null}', "add", 'needs "arguments", an object'),
        ('{"name": "add", "arguments": "{}"}', "add", 'needs "arguments", an object'),
        ('{"name": "add", "arguments": {}, "id": 1}', "add", "has unknown keys: id"),
        ('{"name": "add", "arguments": {}} {}', "add", "something follows its JSON object"),
        ('{"name": "add", "arguments": {}}}', "add", "something follows its JSON object"),
    ],
    ids=one_name,
)
def test_bug_054_a_malformed_call_is_a_call_with_an_error(body: str, name: str, error: str) -> None:
    good = tagged('{"name": "ping", "arguments": {}}')
    text = f"first {tagged(body)} then {good}"
    bad, call = PARSER.parse(text)
    assert bad.raw == tagged(body)
    assert (bad.name, bad.arguments) == (name, None)
    assert bad.error is not None
    assert error in bad.error
    assert call == ToolCall("ping", {}, raw=good)


@pytest.mark.parametrize(
    "body", ['{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {"a":']
)
def test_a_call_that_is_never_closed_is_a_call_with_an_error(body: str) -> None:
    good = tagged('{"name": "ping", "arguments": {}}')
    for after, count in (("", 1), (good, 2)):
        calls = PARSER.parse(f"<tool_call>{body}{after}")
        assert len(calls) == count
        assert calls[0].error is not None
        assert calls[0].raw == f"<tool_call>{body}"


def test_nesting_beyond_reason_is_an_error_too() -> None:
    (call,) = PARSER.parse(tagged('{"a":' * 100_000))
    assert call.error == "the tool call is no valid JSON: it is nested too deeply"


pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name"',
        ": ",
        "{",
        "}",
        '"',
        "\n",
        "word",
        "1e999",
        "\ud800",
        "Infinity",
    ]
)


@quick
@given(st.lists(pieces | st.text(max_size=5), max_size=12).map("".join))
def test_parsing_never_raises_and_reads_every_opening_tag_at_most_once(text: str) -> None:
    calls = PARSER.parse(text)
    assert len(calls) <= text.count("<tool_call>")
    assert (len(calls) > 0) == ("<tool_call>" in text)
    at = 0
    for call in calls:
        assert (call.error is None) == (call.arguments is not None)
        at = text.index(call.raw, at) + len(call.raw)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), json_values, max_size=4))
def test_whatever_json_can_say_comes_back(name: str, arguments: dict[str, Any]) -> None:
    text = tagged(json.dumps({"name": name, "arguments": arguments}))
    assert PARSER.parse(text) == [ToolCall(name, arguments, raw=text)]


# Parsing and checking together


def test_a_checked_call_has_arguments_or_an_error() -> None:
    call = ToolCall("search", {"query": "a", "weight": 2}, raw="r")
    assert checked_call(call, [SEARCH]) == ToolCall(
        "search", {"query": "a", "weight": 2.0}, raw="r"
    )
    bad = checked_call(ToolCall("search", {"limit": 5.7}), [SEARCH])
    assert bad.error == (
        "the arguments of search don't fit: arguments.query: is missing; "
        "arguments.limit: expected integer, got 5.7"
    )


def test_bug_062_an_unknown_tool_is_an_error_like_any_other() -> None:
    call = checked_call(ToolCall("nope", {}), [SEARCH, Tool(ping)])
    assert call.error == "there is no tool 'nope'; the tools are: search, ping"
    malformed = ToolCall("", error="bad")
    assert checked_call(malformed, [SEARCH]) is malformed
    assert checked_call(ToolCall("nope", {}), []).error == (
        "there is no tool 'nope'; the tools are: none"
    )
