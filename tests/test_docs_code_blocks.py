"""Documentation is run: the Python blocks of a page one after another, as one script.

A block is a plain script (async code goes through `anyio.run`), and later blocks of a page see what earlier ones made.
There is no way to leave a Python block out: what is no Python is marked `text`. Of shell blocks only the names are
checked: that the make targets and the flags of the command exist.
"""

from __future__ import annotations

import gc
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {"bash", "json", "python", "text", "toml"}


class Block(NamedTuple):
    kind: str
    line: int
    code: str


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    kind, start, lines = "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"\s*```(.*)", line)
        if fence and not start:
            kind, start, lines = fence[1].strip(), number, []
        elif fence:
            found.append(Block(kind, start, "\n".join(lines) + "\n"))
            start = 0
        else:
            lines.append(line)
    assert not start, f"the block of line {start} is never closed"
    return found


every_page = pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.ray) if p.stem == "ray" else p for p in PAGES],
    ids=lambda p: str(p.relative_to(ROOT)),
)


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    # Anything else, such as "python no-run", would be a block that nobody checks.
    odd = [b for b in blocks_of(page.read_text(encoding="utf-8")) if b.kind not in KINDS]
    assert not odd, f"blocks are marked one of {sorted(KINDS)}: {odd}"


@pytest.fixture
def short_collections() -> Generator[None]:
    """Collecting garbage takes next to nothing, although all tests' modules are loaded.

    Generation of transformers collects when it ends; on a machine that is too busy, that alone took longer than an
    engine waits for its controller.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@every_page
@pytest.mark.usefixtures("short_collections")
def test_python_blocks_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if page.stem == "ray":
        request.getfixturevalue("local_ray")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.kind == "python":
            # Padded, so that a traceback shows the page's own line numbers.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


def commands_of(page: Path) -> list[list[str]]:
    code = "".join(b.code for b in blocks_of(page.read_text(encoding="utf-8")) if b.kind == "bash")
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@every_page
def test_shell_blocks_name_targets_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands_of(page):
        if command[0] == "make":
            asked = {word for word in command[1:] if "=" not in word and not word.startswith("-")}
            assert asked <= targets, f"no such target in {command}"


@every_page
def test_shell_blocks_name_flags_that_exist(page: Path) -> None:
    for command in commands_of(page):
        words = command
        if command[:2] == ["make", "demo"]:
            (arguments,) = [w for w in command if w.startswith("ARGS=")] or ["ARGS="]
            words = ["rollnest", "demo", *shlex.split(arguments.removeprefix("ARGS="))]
        flags = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        if words[0] == "rollnest" and flags:
            help_text = help_of(*words[1 : 3 if words[1] == "bench" else 2])
            unknown = {flag for flag in flags if not re.search(rf"{flag}\b", help_text)}
            assert not unknown, f"no such flag in {command}"


def help_of(*subcommands: str) -> str:
    code = "import sys; from rollnest_adapters.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *subcommands, "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_blocks_are_found_with_their_lines() -> None:
    page = "a\n```python\nx = 1\n```\nb\n```text\n?\n```\n"
    assert blocks_of(page) == [Block("python", 2, "x = 1\n"), Block("text", 6, "?\n")]
    with pytest.raises(AssertionError, match="never closed"):
        blocks_of("```python\n")
