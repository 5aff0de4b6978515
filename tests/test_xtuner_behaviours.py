"""Each behaviour that XTuner's own tests assert is held by a named test here, or there is a reason why not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
INVENTORY = TESTS / "data" / "xtuner_tests.toml"


def items() -> list[tuple[str, dict[str, Any]]]:
    with INVENTORY.open("rb") as file:
        return [(f["name"], item) for f in tomllib.load(file)["file"] for item in f["items"]]


def names_in(module: str) -> set[str]:
    text = (TESTS / f"{module}.py").read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?def ((?:test|check)_\w+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    "item", [item for _, item in items()], ids=[f"{name}: {item['what']}" for name, item in items()]
)
def test_each_behaviour_is_held_by_a_test_or_has_a_reason(item: dict[str, Any]) -> None:
    assert set(item) in ({"what", "tests"}, {"what", "reason"})
    if "reason" in item:
        assert len(item["reason"].split()) >= 4
        return
    assert item["tests"], "no test is named"
    for named in item["tests"]:
        module, _, test = named.partition("::")
        assert test in names_in(module), f"there is no {named}"


def test_nothing_is_listed_twice() -> None:
    seen = [f"{name}: {item['what']}" for name, item in items()]
    assert len(set(seen)) == len(seen) > 100
