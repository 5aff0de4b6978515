"""A server that speaks as LMDeploy 0.18 does (PyTorch engine), by its source; where it is stricter, that is said."""

from __future__ import annotations

import ssl
from typing import Any

from ._fake_policy import Decoding
from ._loopback import Exchange
from ._policy_server import PolicyServer, Refused, Route, check_fields

__all__ = ["LmdeployServer"]

_FIELDS = (
    "session_id",
    "input_ids",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "return_logprob",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "stream",
)
_NEEDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LmdeployServer(PolicyServer):
    """An LMDeploy that misbehaves as it is told.

    Args:
        abort_handling: Whether it was started with --enable-abort-handling.
        logprobs_mode: Its --logprobs-mode; `None` is off, as without the option.
        options: Of `PolicyServer`.

    Attributes:
        asleep: What has no memory: `"weights"`, `"kv_cache"`.
    """

    generates = "/generate"

    def __init__(
        self,
        *,
        abort_handling: bool = True,
        logprobs_mode: str | None = "raw_logprobs",
        vocab_size: int = 1000,
        max_context: int = 4096,
        stop_every: int = 10**9,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        keep_alive: bool = True,
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            max_context=max_context,
            stop_every=stop_every,
            api_key=api_key,
            tls=tls,
            keep_alive=keep_alive,
        )
        self._abort_handling = abort_handling
        self._logprobs_mode = logprobs_mode
        self.asleep: set[str] = set()

    def begin(self, exchange: Exchange, body: dict[str, Any]) -> Decoding:
        """Checks a request as LMDeploy does; what it would ignore, or fill in by itself, is refused here."""
        check_fields(body, _FIELDS, "the request")
        if body.get("return_logprob") and self._logprobs_mode is None:
            raise Refused(
                400, _error("return_logprob(True) requested but not enabled logprobs_mode")
            )
        ids: list[int] = body.get("input_ids") or []
        if not ids or max(ids) >= self.policy.vocab_size or min(ids) < 0:
            raise Refused(400, _error("The input_ids must not be an empty list"))
        most = body.get("max_tokens", 128)
        if most < 1:
            raise Refused(400, _error(f"The max_tokens {most} must be a positive integer."))
        if missing := [name for name in _NEEDED if body.get(name) is None]:
            raise Refused(400, _error(f"{missing} would be the model's own"))
        if not body.get("return_logprob") or not body.get("include_stop_str_in_output"):
            raise Refused(400, _error("logprobs, or the stop token, would be missing"))
        session = body.get("session_id", -1)
        if session < 1 or str(session) in self.policy.decodings:
            raise Refused(400, _error(f"The session_id {session!r} is occupied."))
        return Decoding(
            str(session),
            ids,
            max_tokens=most,
            stop_ids=body.get("stop_token_ids", ()),
            cache="all",
        )

    async def admit(self, decoding: Decoding) -> None:
        """While asleep it answers at once, with nothing."""
        decoding.aborted = bool(self.asleep)

    def whole(self, decoding: Decoding) -> Any:
        """Its answer."""
        return self.part(decoding, 0)

    def part(self, decoding: Decoding, start: int) -> Any:
        """A delta."""
        pairs = list(zip(decoding.logprobs, decoding.ids, strict=True))[start:]
        return {
            "text": "",
            "output_ids": decoding.ids[start:],
            "meta_info": {
                "prompt_tokens": len(decoding.prompt),
                "completion_tokens": len(decoding.ids),
                "finish_reason": None if decoding.finish is None else {"type": decoding.finish},
                "output_token_logprobs": [[logprob, token] for logprob, token in pairs] or None,
                "routed_experts": None,
            },
        }

    def routes(self) -> dict[str, Route]:
        """Its control calls."""
        return {
            "GET /health": self._health,
            "GET /is_sleeping": self._is_sleeping,
            "POST /abort_request": self._abort,
            "POST /sleep": self._sleep,
            "POST /wakeup": self._wake,
        }

    async def _health(self, exchange: Exchange) -> Any:
        return {"status": "sleeping" if self.asleep else "healthy"}

    async def _is_sleeping(self, exchange: Exchange) -> Any:
        return {"is_sleeping": bool(self.asleep)}

    async def _abort(self, exchange: Exchange) -> Any:
        if not self._abort_handling:
            raise Refused(501, b"This server does not support abort requests.")
        body = exchange.request.json()
        held = self.policy.decodings
        if body.get("abort_all"):
            self.aborts.append(None)
            self.policy.abort(held.values())
            return b""
        session = str(body.get("session_id", -1))
        if session != "-1":
            self.aborts.append([session])
        if session not in held:
            raise Refused(400, _error(f"Session {session} not found."))
        self.policy.abort([held[session]])
        return b""

    async def _sleep(self, exchange: Exchange) -> Any:
        self.policy.abort(self.policy.decodings.values())
        self.policy.forget(running=True)
        self.asleep = {"weights", "kv_cache"}
        return b""

    async def _wake(self, exchange: Exchange) -> Any:
        tag = exchange.request.query.get("tags")
        self.asleep -= {"weights", "kv_cache"} if tag is None else {tag}
        return b""


def _error(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "invalid_request_error", "code": 400}
