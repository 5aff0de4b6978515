"""`docs/coming-from-xtuner.md` has a row for every name of what it replaces, and each counterpart exists."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming-from-xtuner.md"
NAMES = ROOT / "tests" / "data" / "xtuner_names.toml"
DESIGN = ROOT / "docs" / "design.md"

LATER: dict[str, str] = {}
"""Counterparts of a later issue, and the words by which section 10 of the design lists them as not built."""


class Row(NamedTuple):
    there: str
    here: tuple[str, ...]
    text: str


def rows_of(page: str) -> list[Row]:
    """The rows of the tables of names; a cell holds no bar."""
    found: list[Row] = []
    _, _, tables = page.partition("## The names")
    for line in tables.splitlines():
        if line.startswith("| `"):
            there, here, text = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(there.strip("`"), tuple(re.findall(r"`([^`]+)`", here)), text))
    return found


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def names() -> list[str]:
    with NAMES.open("rb") as file:
        return [name for part in tomllib.load(file)["part"] for name in part["names"]]


def resolve(name: str) -> None:
    """Finds what a name of the second column stands for.

    Raises:
        LookupError: There is no such thing.
    """
    path, _, argument = name.removesuffix("=)").partition("(")
    steps = path.split(".")
    if steps[0] == "rollnest_adapters":
        thing: Any = import_module(".".join(steps[:2]))
        steps = steps[2:]
    elif steps[0] in ("abc", "errors", "advantages", "filters", "testing"):
        thing = import_module(f"rollnest.{steps[0]}")
        steps = steps[1:]
    else:
        thing = import_module("rollnest")
    for position, step in enumerate(steps):
        if not hasattr(thing, step):
            if position == len(steps) - 1 and step in attributes_of(thing):
                return
            raise LookupError(f"{name}: {thing!r} has no {step!r}")
        thing = getattr(thing, step)
    if argument and argument not in inspect.signature(thing).parameters:
        raise LookupError(f"{name}: {thing!r} takes no argument {argument!r}")


def attributes_of(thing: Any) -> set[str]:
    """Attributes that instances of a class have: those that its docstring lists and its annotations declare."""
    _, _, listed = (inspect.getdoc(thing) or "").partition("Attributes:\n")
    documented = set(re.findall(r"^    (\w+):", listed, re.MULTILINE))
    return documented & set(re.findall(r"self\.(\w+)\b", inspect.getsource(thing)))


def test_every_name_has_one_row() -> None:
    there = [row.there for row in ROWS]
    assert sorted(there) == sorted(names())
    assert len(set(there)) == len(there) > 250


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.there)
def test_every_counterpart_exists_or_a_reason_is_given(row: Row) -> None:
    if not row.here:
        assert len(row.text.split()) >= 5, "a name without a counterpart needs a reason"
    for name in row.here:
        if name not in LATER:
            resolve(name)


def test_what_is_not_there_yet_is_listed_in_the_design() -> None:
    _, _, section = DESIGN.read_text(encoding="utf-8").partition("### Not built yet")
    section = section.partition("###")[0]
    for name, word in LATER.items():
        assert f"`{word}`" in section, f"{name} is built, or the design does not say that it isn't"
        with pytest.raises(LookupError):
            resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "Engine.nothing",
        "Nothing",
        "Engine(nothing=)",
        "Pause.nothing",
        "errors.Nothing",
        "Engine.next_batch(nothing=)",
    ],
)
def test_a_wrong_counterpart_is_noticed(name: str) -> None:
    with pytest.raises(LookupError):
        resolve(name)


def test_rows_are_read() -> None:
    page = "| `no` | `x` | |\n## The names\n\n| there | here | |\n|---|---|---|\n| `a.b` | `C(d=)`, `E` | why |\n"
    assert rows_of(page) == [Row("a.b", ("C(d=)", "E"), "why")]
