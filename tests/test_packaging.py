"""The wheel: two packages, both typed, and nothing else at its top."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return ZipFile(built)


def in_wheel(wheel: ZipFile, prefix: str) -> set[str]:
    return {name for name in wheel.namelist() if name.startswith(prefix)}


def test_the_top_level_holds_exactly_the_two_packages(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"rollnest", "rollnest_adapters", info}


@pytest.mark.parametrize("root", ["engine/rollnest", "adapters/rollnest_adapters"])
def test_every_module_is_in_the_wheel_and_typed(wheel: ZipFile, root: str) -> None:
    source = ROOT / root
    package = source.name
    expected = {f"{package}/{p.relative_to(source).as_posix()}" for p in source.rglob("*.py")}
    assert f"{package}/__init__.py" in expected
    assert in_wheel(wheel, f"{package}/") >= expected | {f"{package}/py.typed"}


@pytest.mark.parametrize("root", ["engine", "adapters"])
def test_the_source_roots_are_no_packages(root: str) -> None:
    # PyPI's `adapters` is a package of this very field, and the engine's name is rollnest.
    assert not (ROOT / root / "__init__.py").exists()


def test_metadata_says_what_it_is_and_needs_only_three_packages(wheel: ZipFile) -> None:
    (name,) = in_wheel(wheel, f"{wheel_name(wheel)}.dist-info/METADATA")
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "rollnest"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in needed) == ["anyio", "attrs", "cattrs"]


def wheel_name(wheel: ZipFile) -> str:
    (info,) = {n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
    return info.removesuffix(".dist-info")


def test_the_command_is_installed(wheel: ZipFile) -> None:
    (name,) = in_wheel(wheel, f"{wheel_name(wheel)}.dist-info/entry_points.txt")
    assert "rollnest = rollnest_adapters.cli:main" in wheel.read(name).decode()


def test_everything_that_is_installed_directly_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(r for extra in extras.values() for r in extra)]
    names = {r.split(">")[0].split("[")[0].strip() for r in needed} - {"rollnest"}
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert names <= pins.keys()
    assert list(pins) == sorted(pins)
