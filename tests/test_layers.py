"""The engine's order: imports point down, tasks start in six modules, and importing it loads little."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "engine" / "rollnest"
ADAPTERS = ROOT / "adapters" / "rollnest_adapters"

# The table of docs/design.md, section 3. A module imports from its own layer or one below, never in a circle.
LAYERS: list[list[str]] = [
    # 0: records
    [
        "_attempt",
        "_checks",
        "_making",
        "_options",
        "_records",
        "_response",
        "_tree",
        "abc",
        "errors",
    ],
    # 1: pure logic
    [
        "_admission",
        "_allocation",
        "_buffer",
        "_capture",
        "_checkpoint",
        "_codecs",
        "_columns",
        "_continuation",
        "_delivery",
        "_figures",
        "_fingerprint",
        "_host_messages",
        "_inspect",
        "_journal",
        "_judgers",
        "_lives",
        "_process_judger",
        "_sampler",
        "_saved",
        "_snapshot",
        "_statistics",
        "_streak",
        "_strategies",
        "_table",
        "_tools",
        "_wire",
        "advantages",
        "filters",
    ],
    # 2: primitives
    [
        "_bell",
        "_breath",
        "_clock",
        "_gate",
        "_instruments",
        "_lag",
        "_outage",
        "_process_worker",
        "_processes",
        "_scopes",
        "_slots",
        "_stall",
        "_stray",
        "_workers",
    ],
    # 3: composition
    [
        "_blocking",
        "_context",
        "_control",
        "_engine",
        "_evaluation",
        "_eviction",
        "_group",
        "_group_loop",
        "_group_rules",
        "_group_session",
        "_host",
        "_host_requests",
        "_hosted_group",
        "_hosted_loop",
        "_hosted_rollout",
        "_judging",
        "_live",
        "_loops",
        "_members",
        "_overview",
        "_parts",
        "_pause",
        "_policy",
        "_prober",
        "_producer",
        "_restore",
        "_rollout",
        "_saving",
        "_sessions",
        "_shortage",
        "_source",
        "_task",
    ],
    # The package's names, and the kit that tests it.
    ["__init__", "hosting"],
    [
        "testing",
        "testing._check",
        "testing._check_loop",
        "testing._clock",
        "testing._conserved",
        "testing._fake_policy",
        "testing._llamacpp_server",
        "testing._lmdeploy_server",
        "testing._loopback",
        "testing._policy_server",
        "testing._recording",
        "testing._scripted",
        "testing._sglang_server",
        "testing._steps",
        "testing._stuck",
        "testing._vllm_server",
        "testing.servers",
        "testing.strategies",
    ],
]
LAYER = {module: number for number, layer in enumerate(LAYERS) for module in layer}
PURE = {*LAYERS[0], *LAYERS[1]} - {"abc"}  # abc says what others implement, async methods too
STARTS_TASKS = {"_engine", "_group_session", "_host", "_members", "_producer", "_sessions"}
THIRD_PARTY = {"anyio", "attrs", "cattrs"}
KIT_MAY_IMPORT = {
    "testing.strategies": {"hypothesis"},
    "testing._clock": {"trio"},
    "testing._loopback": {"h11"},
    "testing._steps": {"trio"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ENGINE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(ENGINE.rglob("*.py"))}
every_module = pytest.mark.parametrize("module", MODULES)
every_adapter = pytest.mark.parametrize(
    "path", sorted(ADAPTERS.rglob("*.py")), ids=lambda p: p.stem
)


@cache
def tree_of(path: Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    gc.disable()  # what other tests left may have finalizers, and CPython's parser takes offense at them
    try:
        return ast.parse(text, str(path))
    finally:
        gc.enable()


def imported(path: Path, package: str) -> Iterator[tuple[str, list[str], ast.stmt]]:
    """What a module imports, wherever it does: the full name, the names taken from it, and the statement."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], node
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            full = ".".join(
                [*(base if node.level else []), *([node.module] if node.module else [])]
            )
            yield full, [alias.name for alias in node.names], node


def engine_imports(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """The engine's modules that one of them imports."""
    package = "rollnest.testing" if module.startswith("testing") else "rollnest"
    for full, names, node in imported(MODULES[module], package):
        if full == "rollnest" or full.startswith("rollnest."):
            inner = full.removeprefix("rollnest").lstrip(".")
            for name in names or [""]:
                candidates = (f"{inner}.{name}".strip("."), inner, "__init__")
                yield next(c for c in candidates if c in MODULES), node


def test_every_module_is_in_the_table() -> None:
    assert set(MODULES) == set(LAYER)


@every_module
def test_imports_point_down(module: str) -> None:
    up = {other for other, _ in engine_imports(module) if LAYER[other] > LAYER[module]}
    assert not up, f"{module} imports from a layer above: {up}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    # What a function or a type checker imports later closes no circle.
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        at_import = {node.lineno for node in tree_of(path).body}
        others = {other for other, node in engine_imports(module) if node.lineno in at_import}
        graph[module] = others - {module}
    list(TopologicalSorter(graph).static_order())


@every_module
def test_the_engine_imports_three_packages_and_the_standard_library(module: str) -> None:
    package = "rollnest.testing" if module.startswith("testing") else "rollnest"
    roots = {full.split(".")[0] for full, _, _ in imported(MODULES[module], package)}
    allowed = {
        "rollnest",
        *THIRD_PARTY,
        *KIT_MAY_IMPORT.get(module, set()),
        *sys.stdlib_module_names,
    }
    assert roots <= allowed


@every_module
def test_tasks_are_started_in_few_modules_only(module: str) -> None:
    starts = [
        node.lineno
        for node in ast.walk(tree_of(MODULES[module]))
        if (isinstance(node, ast.Attribute) and node.attr in ("start_soon", "create_task"))
        or (
            isinstance(node, ast.Await)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "start"
        )
    ]
    if not module.startswith("testing"):
        assert not starts or module in STARTS_TASKS, f"{module} starts tasks in lines {starts}"


@pytest.mark.parametrize(
    "path", [*MODULES.values(), *sorted(ADAPTERS.rglob("*.py"))], ids=lambda p: p.stem
)
def test_no_task_is_without_an_owner(path: Path) -> None:
    loose = {"create_task", "ensure_future", "run_coroutine_threadsafe", "spawn_system_task"}
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.Name)
        and not (isinstance(node, ast.Attribute) and is_of_a_task_group(node))
    }
    assert not names & loose


def is_of_a_task_group(node: ast.Attribute) -> bool:
    """Whether it is a task group's `create_task`: those are called `tasks` or `groups` here, an event loop is not."""
    owner = node.value
    return (
        node.attr == "create_task"
        and isinstance(owner, ast.Name)
        and owner.id in ("tasks", "groups")
    )


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_never_wait(module: str) -> None:
    waits = (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
    assert not [n.lineno for n in ast.walk(tree_of(MODULES[module])) if isinstance(n, waits)]


@every_adapter
def test_adapters_use_public_names_only(path: Path) -> None:
    for full, names, node in imported(path, "rollnest_adapters"):
        if full == "rollnest" or full.startswith("rollnest."):
            private = [part for part in (*full.split("."), *names) if part.startswith("_")]
            assert not private, f"line {node.lineno} imports {private} from {full}"
            for name in names:
                assert hasattr(import_module(full), name), f"{full} has no {name}"


HEAVY = (
    "aiohttp",
    "httpx",
    "httpx2",
    "hypothesis",
    "jinja2",
    "numpy",
    "ray",
    "rollnest_adapters",
    "torch",
    "transformers",
    "trio",
)


@pytest.mark.parametrize(
    "module",
    ["rollnest", "rollnest.abc", "rollnest.advantages", "rollnest.errors", "rollnest.filters"],
)
def test_importing_the_engine_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_kit_is_imported_without_hypothesis_and_http() -> None:
    code = (
        "import sys; sys.modules.update(hypothesis=None, h11=None, httpx2=None, msgspec=None); "
        "import rollnest.testing"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
