"""The table of the docs says what each controller says of itself, and what the fault servers saw of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollnest.abc import Capabilities, PauseMode
from rollnest.errors import WeightUpdateFailed
from rollnest_adapters.transformers import TransformersController

from .conformance import attempt
from .hand_clock import hand_backends
from .http_cases import HttpCase, LlamacppCase, LmdeployCase, SglangCase, VllmCase
from .tiny_llama import tiny_llama

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[1] / "docs" / "topics" / "servers.md"
COLUMNS: dict[str, Callable[[], HttpCase]] = {
    "vLLM": VllmCase,
    "SGLang": SglangCase,
    "LMDeploy": LmdeployCase,
    "llama.cpp": LlamacppCase,
}


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


def table() -> dict[str, dict[str, str]]:
    """What the docs say, by row and server."""
    text = PAGE.read_text(encoding="utf-8").partition("## What each can do")[2]
    lines = text.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:2]]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(cells[0][1:], values, strict=True))
    return rows


def said(row: str, server: str) -> set[str]:
    return set(table()[row][server].replace("-", "").split())


def agrees(server: str, known: Capabilities) -> None:
    if server != "vLLM":  # its mode is an option
        assert said("logprobs", server) == {known.logprobs}
    assert said("sampling", server) == known.sampling
    assert said("pauses", server) == {mode.name for mode in known.pause_modes}
    assert said("memory given back", server) == known.release_tags
    assert said("version of each token", server) == {"yes" if known.version_spans else "no"}


@pytest.mark.parametrize("server", COLUMNS)
async def test_the_table_says_what_the_controllers_say(server: str) -> None:
    async with COLUMNS[server]().opened() as controller:
        agrees(server, controller.capabilities)


def test_the_table_says_what_the_transformers_controller_says() -> None:
    agrees("transformers", TransformersController(tiny_llama()).capabilities)


@pytest.mark.parametrize("server", COLUMNS)
async def test_the_table_says_what_the_servers_see(server: str) -> None:
    case = COLUMNS[server]()
    async with case.opened() as controller:
        rows = {name: row[server] for name, row in table().items()}
        one = attempt(case.prompt(0))
        one.affinity = "rollout-7"
        await controller.generate(one)
        (request,) = case.requests()
        assert request.path == rows["token ids in and out"].strip("`")
        header = rows["affinity"].strip("`").lower()
        assert header == "-" or request.headers[header] == "rollout-7"
        health = await controller.health()
        load = {
            name for name in ("running", "waiting", "cache") if getattr(health, name) is not None
        }
        assert load == said("load", server)
        await controller.pause(PauseMode.ABORT)
        try:
            await controller.update_weights("/models/other", 1)
            loads = "yes"
        except WeightUpdateFailed:
            loads = "no"
        assert rows["weights from a directory"] == loads
        assert (await controller.version() is not None) == (rows["label at the server"] == "yes")
        assert case.can_abort is not ("connection" in rows["abort of one"])
        await controller.resume()
