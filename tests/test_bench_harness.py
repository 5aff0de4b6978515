"""The benches' own parts: rows and verdicts, the one JSON shape, the picture, the command lines; that slowness shows.

Nothing here is timed. Where a bench runs, its clock is a count: it advances by what the test charges for a piece of the
engine or of the baseline, so the figures are certain.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import httpx2
import pytest

from benches import __main__ as all_benches
from benches import (
    bare,
    harness,
    http,
    instant,
    memory,
    nest,
    overhead,
    pause_latency,
    ray_scale,
    save,
    tail,
    wakeup,
)
from benches import profile as profiling
from benches.harness import Row, row
from benches.picture import against_goal, draw
from rollnest import Attempt, Batch, Engine, PauseMode
from rollnest.testing import virtual_backends
from rollnest.testing.servers import VllmServer
from rollnest_adapters._figures import result, summary, table
from rollnest_adapters.vllm import VllmController

BACKENDS = pytest.mark.parametrize("backend", harness.BACKENDS)


# Rows


def test_a_row_is_the_median_beside_its_baseline() -> None:
    made = row("case", "ms", [3.0, 1.0, 2.0], baseline=[2.0, 2.0, 8.0], at_most_ratio=1.0)
    assert (made.value, made.baseline, made.ratio) == (2.0, 2.0, 1.0)
    assert (made.goal, made.holds) == ("<= 1 x baseline", True)
    assert made.samples == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("goal", "words", "holds"),
    [
        ({"at_most": 2.0}, "<= 2 ms", True),
        ({"at_most": 1.9}, "<= 1.9 ms", False),
        ({"at_least": 2.0}, ">= 2 ms", True),
        ({"at_least": 2.1}, ">= 2.1 ms", False),
        ({"baseline": [1.0], "at_most_ratio": 2.0}, "<= 2 x baseline", True),
        ({"baseline": [1.0], "at_most_ratio": 1.5}, "<= 1.5 x baseline", False),
        ({}, None, None),
    ],
)
def test_verdicts(goal: dict[str, Any], words: str | None, holds: bool | None) -> None:
    made = row("case", "ms", [2.0], **goal)
    assert (made.goal, made.holds) == (words, holds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": []}, "must not be empty"),
        ({"samples": [1.0], "baseline": []}, "must not be empty"),
        ({"samples": [1.0], "at_most": 1.0, "at_least": 1.0}, "a row has one goal, got 2"),
        ({"samples": [1.0], "at_most_ratio": 1.0}, "needs a baseline above 0, got None"),
        (
            {"samples": [1.0], "baseline": [0.0], "at_most_ratio": 1.0},
            "needs a baseline above 0, got 0.0",
        ),
    ],
)
def test_rows_that_can_not_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row("case", "ms", **options)


def test_the_one_json_shape() -> None:
    shape = result("b", "abc", [row("case", "ms", [1.0], at_most=2.0)])
    assert list(shape) == ["bench", "machine", "commit", "rows"]
    assert (shape["bench"], shape["commit"]) == ("b", "abc")
    (only,) = shape["rows"]
    assert list(only) == [
        "case", "value", "unit", "samples", "baseline", "ratio", "goal", "holds",
    ]  # fmt: skip
    assert json.loads(json.dumps(shape)) == shape


def test_the_table_says_what_is_missed() -> None:
    rows = [row("good", "ms", [1.0], at_most=2.0), row("bad", "ms", [1.0, 5.0], at_most=2.0)]
    head, good, bad = table("b", "abc", [*rows])
    assert head.startswith("b: ")
    assert head.endswith("commit abc")
    assert good.endswith("<= 2 ms: holds")
    assert "(2 - 4, n=2)" in bad
    assert bad.endswith("<= 2 ms: MISSED")
    assert summary([*rows, row("other", "ms", [1.0])]) == "1 of 2 goals hold; missed: bad"
    assert summary(rows[:1]) == "1 of 1 goals hold"


# The command lines and the picture


def test_a_bench_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[bool] = []

    def run(quick: bool) -> list[Row]:
        asked.append(quick)
        return [row("case", "ms", [1.0, 2.0], at_most=1.0)]

    file = tmp_path / "deep" / "b.json"
    shape = harness.main("b", run, ["--quick", "--json", str(file)])
    assert asked == [True]
    assert json.loads(file.read_text()) == shape
    assert shape["commit"]
    assert capsys.readouterr().out.endswith("0 of 1 goals hold; missed: case\n")


def test_every_bench_is_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert all_benches.main(["--list"]) == 0
    listed = capsys.readouterr().out.split()
    modules = (pause_latency, wakeup, overhead, memory, tail, http, save, ray_scale)
    assert listed == [module.__name__.rpartition(".")[2] for module in modules]
    assert all(callable(module.run) for module in modules)


def test_shares_of_a_goal() -> None:
    def share(samples: list[float], **goal: Any) -> float:
        shares = against_goal(result("b", "c", [row("case", "ms", samples, **goal)])["rows"][0])
        assert shares is not None
        low, middle, high = shares
        assert low <= middle <= high
        return middle

    assert share([1.0, 2.0, 3.0], at_most=4.0) == 0.5
    assert share([1.0, 2.0, 3.0], at_least=4.0) == 2.0
    assert share([1.0, 2.0, 3.0], baseline=[1.0], at_most_ratio=4.0) == 0.5
    assert against_goal({"goal": None}) is None


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = [row("good", "ms", [1.0], at_most=2.0), row("bad", "ms", [5.0], at_most=2.0)]
    draw([result("b", "abc", rows)], tmp_path / "goals.svg")
    text = (tmp_path / "goals.svg").read_text()
    assert "b: good" in text
    assert "1 of 2 goals hold" in text


def test_looks_are_counted_by_module_and_function() -> None:
    looks = profiling.Looks()
    looks.look(None)
    assert "0 looks" in looks.table()
    code = compile("def f():\n    looks.look(sys._getframe())\nf()\n", profiling.__file__, "exec")
    exec(code, {"looks": looks, "sys": __import__("sys")})
    assert looks.modules == {"benches/profile.py": 1}
    assert "benches/profile.py: f" in looks.table()


# That slowness shows


class Clock:
    """Advances by what is charged."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(harness, "clock", made)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes time, and no time is measured
    return made


Charge = Callable[[Any, str, float], None]


@pytest.fixture
def charge(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Charge:
    """Charges so many seconds whenever a function is called."""

    def on_each_call(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def charged(*args: Any, **kwargs: Any) -> Any:
            clock.charge(seconds)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, charged)

    return on_each_call


def verdicts(rows: list[Row]) -> dict[str, bool]:
    return {each.case: each.holds for each in rows if each.holds is not None}


SLOWED = pytest.mark.parametrize("slowed", [1, 10])


@BACKENDS
@SLOWED
def test_a_slower_engine_costs_more_per_sample(
    backend: str, slowed: int, charge: Charge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "BATCH", 64)
    unit = 50e-6
    charge(Attempt, "commit", slowed * unit)  # once for each sample, on the engine's side only
    charge(nest.Nest, "_turn", unit)
    rows = overhead.per_sample(backend, 8, quick=True)
    where = f"{backend}, groups of 8"
    found = verdicts(rows)
    assert found.pop(f"{where}, 10,000 samples") is (slowed == 1)
    if backend == "asyncio":
        assert found.pop(f"{where}, samples per second") is (slowed == 1)
    assert not found
    assert rows[0].value == pytest.approx(50 * slowed)
    assert rows[0].baseline == pytest.approx(50)


@BACKENDS
@SLOWED
def test_a_slower_engine_pauses_later(
    backend: str, slowed: int, charge: Charge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause_latency, "FLOOR_GOALS", {64: pause_latency.FLOOR_GOALS[512]})
    charge(Attempt, "commit", slowed * 1e-3)  # each turn's partial
    charge(bare.Crowd, "park", 1e-3)
    rows = pause_latency.in_flight(backend, (64,), quick=True, modes=[PauseMode.ABORT])
    assert verdicts(rows) == {f"{backend}, ABORT, 64 turns in flight": slowed == 1}
    assert rows[0].value == pytest.approx(64 * slowed)
    assert rows[0].baseline == pytest.approx(64)


@BACKENDS
@SLOWED
def test_a_slower_engine_hands_batches_over_later(
    backend: str, slowed: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_batch = Engine.next_batch

    async def slow(engine: Engine, n: int | None = None) -> Batch:
        batch = await next_batch(engine, n)
        clock.charge(slowed * 0.1e-3)
        return batch

    monkeypatch.setattr(Engine, "next_batch", slow)
    taken = anyio.run(wakeup.batch_ready, 2, 3, backend=backend)
    assert taken == pytest.approx([0.1 * slowed] * 3)
    assert wakeup.batch_row(backend, 2, taken).holds is (slowed == 1)


@BACKENDS
@SLOWED
def test_a_slower_engine_sends_the_first_request_later(
    backend: str, slowed: int, charge: Charge
) -> None:
    charge(Attempt, "__init__", slowed * 0.5e-3)
    first, last = anyio.run(wakeup.resume, 16, 3, backend=backend)
    assert first == pytest.approx([0.5 * slowed] * 3)
    assert last == pytest.approx([8 * slowed] * 3)
    assert wakeup.resume_row(backend, 512, first, baseline=[1.0]).holds is (slowed == 1)


@BACKENDS
@pytest.mark.parametrize("growing", [False, True])
def test_a_scan_at_every_wake_up_shows(
    backend: str, growing: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = instant.NextInLine.group_ended

    def scanning(line: instant.NextInLine, *args: Any) -> None:
        clock.charge(1e-3 * (len(line) if growing else 1))
        ended(line, *args)

    monkeypatch.setattr(instant.NextInLine, "group_ended", scanning)
    few, many = anyio.run(overhead.staggered, (8, 32), 2, 4, backend=backend)
    assert len(few.engine) == len(many.engine) == len(many.nest) == 4
    assert (median(many.engine) / median(few.engine) > 1.2) is growing


# That every bench runs: what it finds is the machine's business


@BACKENDS
def test_what_a_pause_takes_is_measured_in_every_mode(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    for mode in PauseMode:
        assert len(anyio.run(pause_latency.pause, 16, mode, 2, backend=backend)) == 2
    for measured in (
        partial(pause_latency.pause, 16, PauseMode.ABORT, 2, stalls=True),
        partial(pause_latency.pause, 8, PauseMode.ABORT, 2, tokens=64, packed=True),
        partial(bare.bare_floor, 16, 2),
        partial(bare.bare_stall, 16, 2),
        partial(bare.bare_wake, 16, 2),
        partial(bare.bare_cancel, 16, 2, backend),
    ):
        taken = anyio.run(measured, backend=backend)
        assert len(taken) == 2
        assert all(figure > 0 for figure in taken)


@pytest.mark.parametrize("make", virtual_backends(), ids=harness.BACKENDS)
def test_a_late_request_is_quiet_in_half_a_second(
    make: Callable[[], tuple[str, dict[str, Any]]],
) -> None:
    backend, options = make()
    assert anyio.run(pause_latency.late_request, 16, backend=backend, backend_options=options) < 0.5


@BACKENDS
def test_what_samples_keep_is_measured(backend: str) -> None:
    measured: list[Callable[[], Awaitable[float]]] = [
        partial(memory.parked, 16, 8),
        partial(memory.parked, 16, 8, replies=2, tokens=64),
        partial(memory.ready, 16, 8),
        partial(memory.nest_parked, 16, 8),
    ]
    bare_, with_tokens, ready, by_hand = (anyio.run(each, backend=backend) for each in measured)
    assert with_tokens - bare_ > 16 * 2 * 64 * 4  # four bytes of each token's id alone
    assert min(bare_, ready, by_hand) > 0


@BACKENDS
def test_the_nest_gives_every_sample_its_reply(backend: str) -> None:
    async def batches() -> list[int]:
        async with nest.Nest(4, turns=3) as by_hand:
            return [len(await by_hand.batch(groups)) for groups in (1, 5)]

    assert anyio.run(batches, backend=backend) == [4, 20]


@BACKENDS
def test_a_long_run_is_measured_beside_fresh_engines(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "BATCH", 8)
    late, fresh = anyio.run(overhead.against_fresh, backend, 4, 5, backend=backend)
    assert len(late.engine) == len(late.nest) == len(fresh) == 3


def test_partials_that_are_kept_cost_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact, by virtual time: the reason for partial rollouts, in one small run of each way.
    monkeypatch.setattr(tail, "GROUPS", 4)
    monkeypatch.setattr(tail, "SLOTS", 32)
    backend, options = virtual_backends()[0]()
    found = {
        way.name: anyio.run(tail.simulate, way, 0, 4, backend=backend, backend_options=options)
        for way in tail.WAYS
    }
    rates = {name: rate for name, (rate, _) in found.items()}
    assert rates["ABORT, partials kept"] > 2 * rates["synchronous"]
    assert rates["ABORT, partials kept"] > rates["ABORT, partials discarded"]
    assert rates["ABORT, partials kept"] > rates["WAIT"]
    written = {name: cost for name, (_, cost) in found.items()}
    assert written["ABORT, partials discarded"] > written["ABORT, partials kept"]


# The fast server of the bench `http`


@pytest.mark.usefixtures("no_connection_ages")
def test_the_fast_server_answers_as_the_controller_wants() -> None:
    async def ask() -> None:
        with http.serving() as url:
            load = http.Load("two", 2, 4, tokens=3)
            async with VllmController(url) as controller:
                attempt = load.attempt()
                await controller.generate(attempt)
                assert len(attempt.received) == 3
            for way in (http.by_controller, http.by_httpx2, http.by_aiohttp):
                taken = await way(url, load, 2)
                assert len(taken.wall) == len(taken.cpu) == 2
                assert taken.opened <= 2

    anyio.run(ask)


def test_a_client_that_is_slow_takes_no_further_round(clock: Clock) -> None:
    async def ask() -> None:
        with http.serving() as url:

            async def slow() -> None:
                clock.charge(http.ENOUGH)

            taken = await http.measured(url, http.Load("one", 1, 1), slow, 5)
            assert taken.wall == [http.ENOUGH * 1e3]

    anyio.run(ask)


def test_connections_that_are_opened_again_and_again_show() -> None:
    async def ask() -> None:
        with http.serving() as url:

            async def wasteful() -> None:
                async with httpx2.AsyncClient(base_url=url) as client:
                    await client.post("/inference/v1/generate", json=load.body())

            load = http.Load("two", 2, 4)
            assert (await http.measured(url, load, wasteful, 2, before=4)).opened == 8

    anyio.run(ask)


@BACKENDS
@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_what_a_pause_takes_beyond_the_servers_answer_is_measured(
    backend: str, mode: PauseMode
) -> None:
    with http.serving() as url:
        beyond = anyio.run(http.pause_beyond, url, mode, 8, 2, backend=backend)
        ended = 0 if mode is PauseMode.KEEP else 2
        assert (len(beyond.confirmed), len(beyond.recorded)) == (2, ended)


def test_the_bare_clients_post_what_the_controller_posts() -> None:
    async def ask() -> dict[str, Any]:
        server = VllmServer()
        async with server.serve(), VllmController(server.url) as controller:
            await controller.generate(http.Load("one", 1, 1).attempt())
        return server.bodies[0]

    body, bare = anyio.run(ask), http.Load("one", 1, 1).body()
    assert body.keys() == bare.keys()
    assert body["sampling_params"] == bare["sampling_params"]
    assert body["token_ids"] == bare["token_ids"]
