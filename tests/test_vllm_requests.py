"""The controller, the fault server and a live vLLM agree on what may be asked, and how it is answered."""

from __future__ import annotations

import json

import pytest

from rollnest.testing.servers import VllmServer

from .vllm_requests import (
    MAX_CONTEXT,
    REFUSED,
    VOCABULARY,
    asked,
    recorded,
    refused,
    said,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


def fake() -> VllmServer:
    return VllmServer(vocab_size=VOCABULARY, max_context=MAX_CONTEXT)


async def test_the_controller_sends_what_a_live_server_has_taken() -> None:
    good, _ = recorded()
    assert json.loads(json.dumps(await asked())) == json.loads(
        json.dumps([one.call for one in good])
    )
    for one in good:
        probe = one.call[3] and "logit_bias" in one.call[3].get("sampling_params", {})
        assert one.status == (400 if probe else 200)


async def test_the_fault_server_answers_as_a_live_server_has() -> None:
    good, _ = recorded()
    server = fake()
    async with server.serve():
        found = await said(server.url, [one.call for one in good])
    for one, live in zip(found, good, strict=True):
        assert one.status == live.status, one.call
        assert set(one.keys) <= set(live.keys), one.call
    assert len(server.bodies) == sum(
        one.status == 200 and one.call[1] == server.generates for one in good
    )


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[str(r)[:40] for r in REFUSED])
async def test_what_a_live_server_has_refused_the_fault_server_refuses(number: int) -> None:
    good, bad = recorded()
    assert len(bad) == len(REFUSED)
    server = fake()
    async with server.serve():
        call = refused([one.call for one in good])[number]
        (one,) = await said(server.url, [call])
    assert one.status == bad[number]
    assert not server.bodies
