"""Fixtures of all tests: every async test runs on both event loops, under virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollnest.testing import virtual_backends

from .hangs import told_of_hanging
from .orders import ORDERS, draw_order, seed_of_run

ALONE = {"test_mutants", "test_bounds", "test_state_machine", "test_kills"}
"""Files whose tests take minutes together and share nothing: each test goes to whichever worker is free."""

HANGS = 800  # seconds
SHARED = "hunts"
"""A fixture that takes minutes itself: the tests that use it stay together."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Has a test that fails say what gives it the same order of tasks again."""
    report = yield
    if report.failed:
        report.sections.append(("order of trio's tasks", f"{ORDERS}={seed_of_run()}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what stays together when several workers share the tests: a file, for its fixtures, and all of Ray's.

    Before pytest-xdist 3.8 puts the groups into the tests' names, which pytest 9.2 does not look at any more:
    constraints.txt holds it at 9.1.
    """
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif item.path.stem not in ALONE or SHARED in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Has a test that hangs say where, before faulthandler ends the process; and draws the order of its tasks."""
    draw_order(f"{item.path.name}::{item.name}")
    with told_of_hanging(f"{ORDERS}={seed_of_run()} {item.nodeid}", HANGS):
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if the groups were lost on the way: two workers that start a Ray each would be slow, and then hang."""
    if getattr(session.config.option, "loadgroup", False):
        lost = [
            item.nodeid
            for item in session.items
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        if lost:
            raise pytest.UsageError(f"pytest-xdist took no note of the group of {lost[0]}")


@pytest.fixture(params=virtual_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray on this machine for all tests that need one; it is started for the first of them."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def no_connection_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle HTTP connection is used again, however slow the machine is: its age is the one real clock there."""
    monkeypatch.setattr("httpcore2._async.http11.time", SimpleNamespace(monotonic=lambda: 0.0))
