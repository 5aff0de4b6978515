"""Every mutant of the engine is caught by the state machine, within 500 runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import rollnest

from .mutants import FOCUSED, MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
PACKAGE = Path(rollnest.__file__).parent
ADAPTERS = ROOT / "adapters" / "rollnest_adapters"
EXAMPLES, STEPS = 500, 30
AT_ONCE = 2


HEALTHY = Mutant("the engine as it is", "none", ())
"""Without it a fault of the engine or of the machine would look like a mutant that was caught."""


def mutate(mutant: Mutant, folder: Path) -> Path:
    """Writes the engine with the mutant's changes into a folder, and returns the folder."""
    adapters = any(module.startswith(ADAPTERS.name) for module, _, _ in mutant.changes)
    for package in (PACKAGE, ADAPTERS) if adapters else (PACKAGE,):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, folder / package.name, ignore=ignored)
    for module, old, new in mutant.changes:
        path = folder / (module if module.startswith(ADAPTERS.name) else f"rollnest/{module}")
        text = path.read_text(encoding="utf-8")
        check_change(mutant, module, text, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def check_change(mutant: Mutant, module: str, text: str, old: str) -> None:
    """What a mutant changes stands in a module, once."""
    found = text.count(old)
    assert found == 1, f"mutant {mutant.name!r}: {found} times in {module}: {old!r}"


def hunt(folder: Path, mutant: Mutant) -> str:
    """Plays the machine against the mutant; returns what was found, after the number of the run that found it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.hunt", mutant.backend, str(EXAMPLES), str(STEPS)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # a guard against a mutant that hangs, not a bound on time
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip()


@pytest.fixture(scope="module")
def hunts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[str]]:
    """Begins all hunts, two at a time."""

    def one(mutant: Mutant) -> str:
        folder = tmp_path_factory.mktemp("mutant", numbered=True)
        return hunt(mutate(mutant, folder), mutant)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {mutant.name: pool.submit(one, mutant) for mutant in (HEALTHY, *MUTANTS)}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.invariant}: {m.name}")
def test_the_mutant_is_caught(
    mutant: Mutant, hunts: dict[str, Future[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunts[HEALTHY.name].result().endswith("nothing"), (
        "the machine is not content with any engine"
    )
    played, _, found = hunts[mutant.name].result().partition(" ")
    with capsys.disabled():
        sys.stdout.write(f"\n{mutant.invariant:<9}run {played:>3}: {mutant.name}: {found[:90]} ")
    assert found != "nothing", f"{mutant.name!r} lived through {played} runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "mutant"), FOCUSED, ids=[f"{m.invariant}: {m.name}" for _, m in FOCUSED]
)
def test_the_mutant_is_caught_by_its_tests(tests: str, mutant: Mutant, tmp_path: Path) -> None:
    mutate(mutant, tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-k", "not every_step", f"tests/{tests}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, f"{mutant.name!r} lived: {done.stdout[-500:]}"
    assert "FAILED" in done.stdout


@pytest.mark.parametrize("mutant", [*MUTANTS, *(m for _, m in FOCUSED)], ids=lambda m: m.name)
def test_what_a_mutant_changes_is_there(mutant: Mutant) -> None:
    texts: dict[str, str] = {}
    for module, old, new in mutant.changes:
        path = ADAPTERS.parent / module if module.startswith(ADAPTERS.name) else PACKAGE / module
        text = texts.get(module) or path.read_text(encoding="utf-8")
        check_change(mutant, module, text, old)
        texts[module] = text.replace(old, new)
    for module, text in texts.items():
        compile(text, module, "exec")


def test_each_invariant_has_two_mutants_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    invariants = [mutant.invariant for mutant in MUTANTS]
    invariants += [mutant.invariant for _, mutant in FOCUSED if mutant.invariant == "I6"]
    for number in range(1, 12):
        assert invariants.count(f"I{number}") >= 2, f"I{number}"
