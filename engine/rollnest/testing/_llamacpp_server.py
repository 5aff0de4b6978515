"""A server that speaks as llama.cpp's does, by its documentation; where it is stricter, that is said."""

from __future__ import annotations

from typing import Any

from ._fake_policy import Decoding
from ._loopback import Exchange
from ._policy_server import PolicyServer, Refused, Route, check_fields

__all__ = ["LlamacppServer"]

_FIELDS = (
    "prompt",
    "n_predict",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "samplers",
    "seed",
    "stop",
    "n_probs",
    "return_tokens",
    "stream",
)
_NEEDED = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "n_probs", "return_tokens")


class LlamacppServer(PolicyServer):
    """A llama.cpp server that misbehaves as it is told."""

    generates = "/completion"
    says_done = False

    def begin(self, exchange: Exchange, body: dict[str, Any]) -> Decoding:
        """Checks a request; what it would ignore, or fill in by itself, is refused here."""
        check_fields(body, _FIELDS, "the request")
        if missing := [name for name in _NEEDED if body.get(name) is None]:
            raise Refused(400, _error(f"{missing} would be on by themselves"))
        ids: list[int] = body.get("prompt") or []
        most = body.get("n_predict", -1)
        if not ids or max(ids) >= self.policy.vocab_size or most < 1 or not body.get("stream"):
            raise Refused(400, _error("Prompt contains invalid tokens"))
        if len(ids) + most > self.policy.max_context:
            raise Refused(400, _error("the request exceeds the available context size"))
        return Decoding(f"task {len(self.bodies)}", ids, max_tokens=most, cache="slot")

    def whole(self, decoding: Decoding) -> Any:
        """Is not played: what is not streamed can't be cut."""
        raise AssertionError

    def part(self, decoding: Decoding, start: int) -> Any:
        """A delta; its last part says why it ended."""
        pairs = list(zip(decoding.ids, decoding.logprobs, strict=True))[start:]
        kinds = {"stop": "eos", "length": "limit", "abort": "none"}
        part: dict[str, Any] = {
            "index": 0,
            "content": "",
            "tokens": [token for token, _ in pairs],
            "stop": decoding.finish is not None,
            "completion_probabilities": [
                {"id": token, "token": "", "logprob": logprob, "top_logprobs": []}
                for token, logprob in pairs
            ],
        }
        if decoding.finish is not None:
            part["stop_type"] = kinds[decoding.finish]
        return part

    def routes(self) -> dict[str, Route]:
        """Its control calls."""
        return {
            "GET /health": self._health,
            "GET /props": self._props,
            "GET /slots": self._slots,
            "GET /v1/models": self._models,
        }

    async def _health(self, exchange: Exchange) -> Any:
        return {"status": "ok"}

    async def _props(self, exchange: Exchange) -> Any:
        return {
            "default_generation_settings": {"n_ctx": self.policy.max_context},
            "total_slots": 4,
        }

    async def _slots(self, exchange: Exchange) -> Any:
        busy = [not decoding.waiting for decoding in self.policy.decodings.values()]
        return [{"id": i, "is_processing": b} for i, b in enumerate([*busy, False])]

    async def _models(self, exchange: Exchange) -> Any:
        meta = {"n_vocab": self.policy.vocab_size, "n_ctx_train": 8192}
        return {"object": "list", "data": [{"id": "fake", "meta": meta}]}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
