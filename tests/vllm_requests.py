"""Every kind of request that the vLLM controller makes, and what a live vLLM said to each.

`data/vllm_requests.json` was written by the live suite, which sends these requests to a real server. So the fault
server, the controller and the real one can't drift apart unseen: the normal suite compares them with that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import anyio
import httpx2
from anyio.lowlevel import checkpoint
from attrs import asdict, frozen

from rollnest import Attempt, PauseMode, Sampling
from rollnest.testing.servers import Request, VllmServer
from rollnest_adapters.vllm import VllmController

__all__ = [
    "MAX_CONTEXT", "RECORDED", "REFUSED", "VOCABULARY", "Call", "Said", "asked", "record", "recorded",
    "refused", "said",
]  # fmt: skip

RECORDED = Path(__file__).parent / "data" / "vllm_requests.json"

VOCABULARY, MAX_CONTEXT = 49_152, 2048
"""Of the live server's model."""

MODEL = "/models/other"
"""A directory of weights, for the server that plays vLLM."""

_ID = "0" * 32
_EVERY: dict[str, Any] = {
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "stop": ("\n\n",),
    "stop_token_ids": (5,),
    "seed": 3,
}

REFUSED: list[dict[str, Any]] = [
    {"token_ids": []},
    {"token_ids": [-1]},
    {"token_ids": [VOCABULARY]},
    {"token_ids": "text"},
    {"token_ids": [1] * MAX_CONTEXT},
    {"cache_salt": ""},
    {"sampling_params": None},
    *(
        {"sampling_params": {"max_tokens": 4, "logprobs": 0, **wrong}}
        for wrong in (
            {"max_tokens": 0},
            {"max_tokens": "four"},
            {"min_tokens": 5},
            {"min_tokens": -1},
            {"temperature": 2.5},
            {"temperature": -1.0},
            {"top_p": 0.0},
            {"top_p": 1.5},
            {"top_k": -2},
            {"min_p": 1.5},
            {"stop": [""]},
            {"stop_token_ids": ["five"]},
            {"logprobs": -2},
            {"stream_interval": 0},
            {"logit_bias": {str(VOCABULARY): 0.0}},
        )
    ),
]
"""Changes to a good request for tokens that make it a bad one."""


Call: TypeAlias = "tuple[str, str, dict[str, str], Any]"
"""Method, path, query and JSON of a request."""


@frozen
class Said:
    """What was said to a request.

    Attributes:
        call: The request.
        status: The answer's.
        keys: Which keys the answer's JSON has, from its root on, or those of all events of a stream; of metrics, their
            names.
    """

    call: Call
    status: int
    keys: list[str]


async def asked() -> list[Call]:
    """What the controller sends: every kind of request, in an order that works, with ids that don't change."""
    server = VllmServer(vocab_size=VOCABULARY, max_context=MAX_CONTEXT)
    async with server.serve():
        for stream_every in (None, 3):
            async with VllmController(server.url, stream_every=stream_every) as controller:
                for sampling in ({}, _EVERY, *({name: value} for name, value in _EVERY.items())):
                    await controller.generate(_attempt(**sampling))
                with server.stalled(after=1):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(controller.generate, _attempt())
                        while not server.policy.decodings:
                            await checkpoint()
                        await controller.abort(None)
        async with VllmController(server.url) as controller:
            for version, mode in enumerate((PauseMode.ABORT, PauseMode.KEEP), 1):
                await controller.pause(mode)
                await controller.update_weights(MODEL, version)
                await controller.resume()
            await controller.health()
    return [_call(request) for request in server.http.requests]


def _attempt(**sampling: Any) -> Attempt:
    return Attempt(
        [1, 504, 3575], max_tokens=4, sampling=Sampling(4, **sampling), affinity="rollout"
    )


def _call(request: Request) -> Call:
    body = request.json() if request.body else None
    if body and "request_id" in body:
        body["request_id"] = _ID
    if body and "request_ids" in body:
        body["request_ids"] = [f"generate-tokens-{_ID}"]
    return request.method, request.path, request.query, body


async def said(url: str, calls: Sequence[Call], *, model: str = MODEL) -> list[Said]:
    """Asks a server, one request after the other.

    Args:
        url: Its root.
        calls: What to ask.
        model: Another directory of weights, which this server can read.
    """
    found: list[Said] = []
    async with httpx2.AsyncClient(base_url=url, timeout=120.0) as client:
        for method, path, query, body in calls:
            text = json.dumps(body).replace(json.dumps(MODEL), json.dumps(model))
            answer = await client.request(
                method,
                path,
                params=query,
                content=None if body is None else text,
                headers={"content-type": "application/json"},
            )
            found.append(Said((method, path, query, body), answer.status_code, _keys(answer.text)))
    return found


def refused(calls: Sequence[Call]) -> list[Call]:
    """Bad requests for tokens, each of which is one change away from a good one."""
    method, path, query, body = next(
        call for call in calls if call[1] == VllmServer.generates and "request_id" in call[3]
    )
    return [(method, path, query, body | change) for change in REFUSED]


def _keys(text: str) -> list[str]:
    if text.startswith("#"):
        return sorted(set(re.findall(r"^(vllm:\w+)", text, re.MULTILINE)))
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    found: set[str] = set()
    for event in events or [text]:
        found |= {event} if event == "[DONE]" else _paths(json.loads(event)) if event else set()
    return sorted(found)


def _paths(value: Any, at: str = "") -> set[str]:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {
            path
            for key, inner in fields.items()
            for path in (f"{at}.{key}", *_paths(inner, f"{at}.{key}"))
        }
    if isinstance(value, list):
        inside = cast("Sequence[Any]", value)
        return {path for inner in inside for path in _paths(inner, f"{at}[]")}
    return set()


def record(good: Sequence[Said], bad: Sequence[Said], vllm: str) -> str:
    """The file's text."""
    taken = [json.dumps(asdict(one)) for one in good]
    turned_away = [
        json.dumps([json.dumps(change)[:90], one.status])
        for change, one in zip(REFUSED, bad, strict=True)
    ]
    lists = [",\n".join(lines) for lines in (taken, turned_away)]
    return f'{{"vllm": "{vllm}",\n"taken": [\n{lists[0]}\n],\n"refused": [\n{lists[1]}\n]}}\n'


def recorded() -> tuple[list[Said], list[int]]:
    """What a live server has said to the controller's requests, and its statuses for bad ones."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))
    good = [Said(tuple(one["call"]), one["status"], one["keys"]) for one in kept["taken"]]
    return good, [status for _, status in kept["refused"]]
