"""Calls of somebody else's service: how many at once, how many a second, and how often again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest
from anyio import create_task_group, current_time, fail_after, move_on_after, sleep
from hypothesis import given
from hypothesis import strategies as st

from rollnest.errors import InferenceError
from rollnest_adapters._limiter import CallOptions, Limiter, Pace

anyio_only = pytest.mark.anyio


def limiter(**options: Any) -> Limiter:
    defaults: dict[str, Any] = {"concurrency": 100, "rate": None, "tries": 3, "max_wait": 30.0}
    return Limiter(CallOptions(**(defaults | options)))


class Service:
    """Fails as often as it is told, then answers."""

    def __init__(self, *errors: Exception, seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.seconds = seconds
        self.times: list[float] = []
        self.most = self.now = 0

    async def __call__(self) -> str:
        self.times.append(current_time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await sleep(self.seconds)
            if self.errors:
                raise self.errors.pop(0)
            return "done"
        finally:
            self.now -= 1


class Busy(InferenceError):
    def __init__(self, retry_after: float | None) -> None:
        super().__init__("429: busy", retryable=True)
        self.retry_after = retry_after


def down() -> InferenceError:
    return InferenceError("503: down", retryable=True)


@anyio_only
async def test_bug_085_what_may_pass_is_called_again_and_a_refusal_is_not() -> None:
    service = Service(down(), down())
    assert await limiter().run(service) == "done"
    assert [time - service.times[0] for time in service.times] == [0.0, 0.5, 1.5]
    service = Service(InferenceError("400: no"))
    with pytest.raises(InferenceError, match="400: no"):
        await limiter().run(service)
    assert len(service.times) == 1
    service = Service(ValueError("ours"))
    with pytest.raises(ValueError, match="ours"):
        await limiter().run(service)
    assert len(service.times) == 1


@anyio_only
async def test_bug_086_there_are_as_many_tries_as_was_said() -> None:
    for tries in (1, 2, 5):
        service = Service(*(down() for _ in range(9)))
        with pytest.raises(InferenceError, match="503: down"):
            await limiter(tries=tries).run(service)
        assert len(service.times) == tries


@anyio_only
async def test_a_service_says_how_long_to_wait_unless_that_is_too_long() -> None:
    service = Service(Busy(7.0), Busy(None))
    before = current_time()
    assert await limiter().run(service) == "done"
    assert [time - before for time in service.times] == [0.0, 7.0, 8.0]
    service = Service(Busy(3600.0))
    with pytest.raises(InferenceError, match="asks to wait for 3600 s, max_wait is 30 s") as caught:
        await limiter().run(service)
    assert not caught.value.retryable
    service = Service(*(down() for _ in range(8)))
    assert await limiter(tries=9, max_wait=2.0).run(service) == "done"
    assert service.times[-1] - service.times[-2] == 2.0


@anyio_only
async def test_so_many_at_once_and_a_place_is_free_between_two_tries() -> None:
    limited, service = limiter(concurrency=4), Service(seconds=1.0)
    before = current_time()
    async with create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(limited.run, service)
    assert service.most == 4
    assert current_time() - before == 5.0
    limited, failing, other = limiter(concurrency=1), Service(down()), Service()
    async with create_task_group() as tasks:
        tasks.start_soon(limited.run, failing)
        await sleep(0.1)
        tasks.start_soon(limited.run, other)
    assert other.times[0] < failing.times[1]


@anyio_only
async def test_so_many_a_second() -> None:
    limited, service = limiter(rate=4.0), Service()
    async with create_task_group() as tasks:
        for _ in range(9):
            tasks.start_soon(limited.run, service)
    assert [time - service.times[0] for time in service.times] == [0.25 * i for i in range(9)]
    await sleep(100)  # nothing is saved up
    before = current_time()
    for _ in range(3):
        await limited.run(service)
    assert current_time() - before == 0.5


@anyio_only
async def test_bug_096_a_call_that_is_cancelled_keeps_no_place() -> None:
    limited, service = limiter(concurrency=2), Service(seconds=100.0)
    with move_on_after(5):
        async with create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(limited.run, service)
    service.seconds = 0.0
    with fail_after(1):
        for _ in range(4):
            await limited.run(service)
    assert service.now == 0


def test_each_event_loop_has_its_own_places() -> None:
    limited, service = limiter(concurrency=1, rate=1.0), Service()
    for _ in range(3):
        for backend in ("asyncio", "trio"):
            assert anyio.run(limited.run, service, backend=backend) == "done"


@given(st.floats(0.1, 100), st.lists(st.floats(0, 5), min_size=1, max_size=50).map(sorted))
def test_no_second_has_more_than_it_may(rate: float, arrivals: list[float]) -> None:
    pace = Pace(rate)
    starts = [now + pace.wait(now) for now in arrivals]
    assert starts == sorted(starts)
    for earlier, later in pairwise(starts):
        assert later - earlier >= 1 / rate - 1e-9
    for now, start in zip(arrivals, starts, strict=True):
        assert start >= now


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be >= 1, got 0"),
        ({"rate": 0}, ValueError, "rate must be > 0 and finite, got 0"),
        ({"rate": "1/s"}, TypeError, "rate must be a number, got '1/s'"),
        ({"tries": 0}, ValueError, "tries must be >= 1, got 0"),
        ({"tries": 1.5}, TypeError, "tries must be an int, got 1.5"),
        ({"max_wait": float("inf")}, ValueError, "max_wait must be > 0 and finite, got inf"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        limiter(**options)
