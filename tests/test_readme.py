"""The README's example is a file that runs, short enough to be called ten lines, on public names only."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from pathlib import Path

import pytest

from .test_docs_code_blocks import blocks_of

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "embed.py"
IMPORT = (ast.Import, ast.ImportFrom)
CODE = EXAMPLE.read_text(encoding="utf-8")


def imports() -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(CODE)) if isinstance(node, IMPORT)]


def test_the_block_is_the_file() -> None:
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [block.code for block in blocks if block.kind == "python"] == [CODE]


def test_it_has_at_most_ten_lines() -> None:
    lines = CODE.splitlines()
    assert max(map(len, lines)) <= 100
    importing = {n for node in imports() for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    counted = [line for n, line in enumerate(lines, 1) if line.strip() and n not in importing]
    assert len(counted) <= 10  # comments count
    assert not any(";" in line for line in counted)


def test_it_imports_public_names_only() -> None:
    ours: set[str] = set()
    for node in imports():
        if isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= sys.stdlib_module_names
            continue
        assert node.level == 0
        assert node.module
        if node.module.split(".")[0] in sys.stdlib_module_names:
            continue
        ours.add(node.module)
        module = importlib.import_module(node.module)
        for name in node.names:
            assert hasattr(module, name.name)
            public = not any(part.startswith("_") for part in [*node.module.split("."), name.name])
            assert public, f"{node.module}.{name.name}"
    assert ours == {"rollnest", "rollnest.testing"}


def test_it_uses_no_private_attribute() -> None:
    attributes = [
        node.attr for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.Attribute)
    ]
    assert not [name for name in attributes if name.startswith("_")]


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    made = runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "closed, v4" in repr(made["engine"])
    assert made["batch"].index == 4
    assert all(sample.reward in (0.0, 1.0) for sample in made["batch"].samples)
    assert made["policy"].open == {}
    assert [entry for entry in made["policy"].log if entry[0] == "update_weights"] == [
        ("update_weights", version) for version in (1, 2, 3, 4)
    ]
    assert capsys.readouterr().out == ""
