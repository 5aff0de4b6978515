"""A test can be given an order of tasks again."""

from __future__ import annotations

import pytest
import trio

from .orders import ORDERS, draw_order


def _order() -> tuple[int, ...]:
    ran: list[int] = []

    async def run(number: int) -> None:
        ran.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(run, number)

    trio.run(main)
    return tuple(ran)


def test_tasks_run_in_any_order_and_in_the_same_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[int, ...]] = []
    for run in range(2):
        for seed in range(20):
            monkeypatch.setenv(ORDERS, str(seed))
            draw_order("a test")
            orders.append(_order())
        assert len(set(orders)) > 2, run  # not just forwards and backwards
    assert orders[:20] == orders[20:]


def test_each_test_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORDERS, "1")
    orders: set[tuple[int, ...]] = set()
    for number in range(20):
        draw_order(f"test {number}")
        orders.add(_order())
    assert len(orders) > 2
