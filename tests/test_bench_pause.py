"""`rollnest bench pause`: its figures under virtual time, and what it says when there are none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollnest.abc import Capabilities, PauseMode
from rollnest.errors import InferenceError
from rollnest.testing import Reply, ScriptedController, virtual_backends
from rollnest_adapters.bench import BenchError, PauseBench, load_factory, measure_pause
from rollnest_adapters.cli import main

EVERY_CLOCK = pytest.mark.parametrize("make", virtual_backends(), ids=["asyncio", "trio"])
Make = Callable[[], tuple[str, dict[str, Any]]]

CONTROLLERS = """
from rollnest.testing import Reply, ScriptedController

def make():
    return ScriptedController(lambda attempt: Reply([1] * 64, delay=60.0))

async def make_later():
    return make()

def broken():
    raise OSError("no server at 127.0.0.1:1")

number = 3

class Servers:
    @staticmethod
    def make():
        return make()
"""


def slow(delay: float = 60.0, deaf: int = 0, **options: Any) -> Callable[[], ScriptedController]:
    """A factory of servers that are at every answer for a minute."""
    return lambda: ScriptedController(lambda _: Reply([1] * 64, delay=delay, deaf=deaf), **options)


def measure(make: Make, factory: Callable[[], object], **options: Any) -> dict[str, list[float]]:
    backend, backend_options = make()
    bench = PauseBench(in_flight=8, pauses=3, **options)
    rows = anyio.run(
        measure_pause, factory, bench, backend=backend, backend_options=backend_options
    )
    return {each.case: list(each.samples) for each in rows}


# Figures


@EVERY_CLOCK
def test_an_abort_that_takes_its_time_is_what_is_measured(make: Make) -> None:
    found = measure(make, slow(abort_delay=0.25))
    assert found["ABORT, 8 turns in flight: pause to quiet"] == pytest.approx([250.0] * 3)
    assert found["ABORT, 8 turns in flight: resume to first request"] == [0.0] * 3
    assert found["ABORT, 8 turns in flight: resume to last request"] == [0.0] * 3
    assert found["turns in flight when it began"] == [8.0] * 3
    assert found["turns cut without an answer, each pause"] == [0.0] * 3


@EVERY_CLOCK
def test_a_server_that_hears_no_abort_is_cut_after_grace(make: Make) -> None:
    found = measure(make, slow(deaf=-1), grace=2.0)
    assert found["ABORT, 8 turns in flight: pause to quiet"] == pytest.approx([2000.0] * 3)
    assert found["turns cut without an answer, each pause"] == [8.0] * 3


@EVERY_CLOCK
def test_waiting_lasts_as_long_as_the_turns(make: Make) -> None:
    # Turns of 2 s, paused 0.5 s after they began; every later one begins when the pause is over.
    found = measure(make, slow(delay=2.0), mode=PauseMode.WAIT)
    assert found["WAIT, 8 turns in flight: pause to quiet"] == pytest.approx([1500.0] * 3)
    assert found["turns cut without an answer, each pause"] == [0.0] * 3


@EVERY_CLOCK
def test_short_contexts_are_followed_by_new_ones(make: Make) -> None:
    # A context holds one answer only, so samples end all the time, and others take their place.
    small = Capabilities(vocab_size=31, max_context=96)
    found = measure(make, slow(delay=0.4, capabilities=small), settle=1.0)
    assert found["turns in flight when it began"] == [8.0] * 3


# Why there are none


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (slow(pause_hangs=True), {}, "the pause failed: the controller did not confirm the pause"),
        (slow(resume_failures=99), {}, "the controller did not resume: InferenceError: 503"),
        (
            slow(version=3),
            {},
            r"can't be entered: ValueError: version is 0, but the controller reports 3 \(--version",
        ),
        (lambda: 3, {}, "the factory returned int, which is no controller: it lacks __aenter__"),
        (
            lambda: ScriptedController(lambda _: Reply([], error=InferenceError("no route"))),
            {},
            "the controller answers no turn: .*no route",
        ),
        (
            lambda: ScriptedController(capabilities=Capabilities(vocab_size=8, max_context=64)),
            {},
            "the controller answers no turn: .*outside the vocabulary of 8",
        ),
    ],
)
@EVERY_CLOCK
def test_a_controller_that_can_not_be_measured(
    make: Make, factory: Callable[[], object], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        measure(make, factory, **options)


@EVERY_CLOCK
def test_a_version_that_is_given_is_believed(make: Make) -> None:
    assert measure(make, slow(version=3), version=3)


@EVERY_CLOCK
def test_a_server_that_takes_no_more_turns(make: Make) -> None:
    class Closed(ScriptedController):
        async def __aenter__(self) -> Closed:
            raise ConnectionRefusedError("127.0.0.1:8000")

    with pytest.raises(BenchError, match="entered: ConnectionRefusedError: 127"):
        measure(make, Closed)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("controllers", "give the factory as MODULE:FACTORY, got 'controllers'"),
        (":make", "give the factory as MODULE:FACTORY, got ':make'"),
        ("controllers:", "give the factory as MODULE:FACTORY, got 'controllers:'"),
        ("nowhere.at_all:make", "there is no module 'nowhere' here or on Python's path"),
        ("needs_more:make", "needs_more can't be imported: it needs nowhere_to_be_found"),
        ("has_a_fault:make", "has_a_fault can't be imported: ZeroDivisionError"),
        ("controllers:other", "controllers has no 'other'"),
        ("controllers:Servers.other", "controllers has no 'Servers.other'"),
        ("controllers:number", "controllers:number is 3; it must be a function or a class"),
        ("controllers:make_later", "the factory is async; it must be an ordinary function"),
        ("controllers:broken", "the factory raised OSError: no server at 127.0.0.1:1"),
        ("controllers:Servers", "the factory returned Servers, which is no controller"),
    ],
)
def test_bad_targets_are_one_line(
    target: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_home(tmp_path, monkeypatch)
    assert main(["bench", "pause", target]) == 1
    said = capsys.readouterr().err
    assert said.startswith("rollnest: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: WHAT"),
        (["resume"], "invalid choice: 'resume'"),
        (["pause"], "required: MODULE:FACTORY"),
        (["pause", "m:f", "--in-flight", "0"], "--in-flight: must be >= 1, got 0"),
        (["pause", "m:f", "--mode", "stop"], "--mode: must be one of"),
        (["pause", "m:f", "--grace", "-1"], "--grace: must be finite and >= 0, got -1"),
        (["pause", "m:f", "--backend", "curio"], "--backend: invalid choice: 'curio'"),
    ],
)
def test_wrong_arguments_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="in_flight must be >= 1, got 0"):
        PauseBench(in_flight=0)


# The command


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("factory", ["make", "Servers.make"])
def test_the_command_prints_a_table_and_writes_json(
    backend: str,
    factory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_home(tmp_path, monkeypatch)
    options = ["--in-flight", "4", "--pauses", "2", "--settle", "0", "--json", "out.json"]
    given = ["bench", "pause", f"controllers:{factory}", *options, "--backend", backend]
    assert main(given) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("pause: ")
    assert rows[0].startswith("  ABORT, 4 turns in flight: pause to quiet ")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["bench", "machine", "commit", "rows"]
    assert [len(row["samples"]) for row in written["rows"]] == [2] * len(rows)
    assert all(row["baseline"] > 0 for row in written["rows"] if row["unit"] == "ms")


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts modules into a working directory."""
    (folder / "controllers.py").write_text(CONTROLLERS)
    (folder / "needs_more.py").write_text("import nowhere_to_be_found\n")
    (folder / "has_a_fault.py").write_text("1 / 0\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("controllers", "needs_more", "has_a_fault"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_modules_of_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(CONTROLLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_factory("only_here:make")(), ScriptedController)
