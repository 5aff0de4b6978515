"""The reference page is what the sources say: `python docs/generate_reference.py` writes it anew."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "generate_reference.py"
GENERATOR: dict[str, Any] = runpy.run_path(str(SCRIPT))


def test_the_page_is_up_to_date() -> None:
    page = GENERATOR["PAGE"].read_text(encoding="utf-8")
    assert page == GENERATOR["reference"](), "run: python docs/generate_reference.py"


def test_the_check_agrees() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("module", GENERATOR["MODULES"])
def test_every_public_name_is_on_the_page_and_exists(module: str) -> None:
    listed = [name.name for name in GENERATOR["_public"](module)]
    assert listed
    assert len(set(listed)) == len(listed)
    loaded = import_module(module)
    assert all(hasattr(loaded, name) for name in listed)
    if module == "rollnest":
        exported = {n for n in dir(loaded) if not n.startswith("_")}
        submodules = {"abc", "advantages", "errors", "filters", "hosting", "testing", "annotations"}
        submodules |= {"TYPE_CHECKING", "Any"}  # what the module itself needs
        assert set(listed) == exported - submodules


def test_every_public_module_is_on_the_page() -> None:
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for root in (ROOT / "engine", ROOT / "adapters")
        for path in root.rglob("*.py")
    }
    public = {
        module
        for module in modules
        if not any(part.startswith("_") for part in module.split("."))
        and not module.startswith("rollnest_adapters.demo")  # an example, no library
    }
    assert public - {"rollnest_adapters"} == set(GENERATOR["MODULES"])


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("@frozen\nclass A:\n    x: int\n    y: str = field(default='', kw_only=True)", "A(x: int, *, y: str = '')"),
        ("@frozen(kw_only=True)\nclass A:\n    x: list[int] = field(factory=list[int])", "A(*, x: list[int] = [])"),
        ("@frozen\nclass A:\n    x: L = field(default=Factory(L))", "A(x: L = L())"),
        ("@frozen\nclass A:\n    x: int = field(default=1, init=False)", "A()"),
        ("class A(B):\n    def __init__(self, x: 'C', /, *y: int, z=1, **k: int): ...",
         "A(x: C, *y: int, z = 1, **k: int)    # inherits B"),
        ("class A(Protocol): ...", "protocol A"),
    ],
)  # fmt: skip
def test_signatures_of_classes(source: str, signature: str) -> None:
    (node,) = ast.parse(source).body
    assert GENERATOR["_class_signature"](node) == signature


def test_sections_become_lists() -> None:
    docstring = (
        "First.\n\nArgs:\n    x: One\n        two.\n    y: Three.\n\nReturns:\n    A thing.\n\nCancellation: at\n"
        "once.\n\n    code()\n\nLast."
    )
    assert GENERATOR["_prose"](docstring) == (
        "First.\n\nArguments:\n\n- `x`: One two.\n- `y`: Three.\n\nReturns: A thing.\n\nCancellation: at once.\n\n"
        "```text\ncode()\n```\n\nLast."
    )
