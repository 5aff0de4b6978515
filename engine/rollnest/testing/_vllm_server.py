"""A server that speaks as vLLM 0.32 does, over `rollnest.testing.servers.PolicyServer`.

What it takes and answers was seen on a live one; where it is stricter, that is said.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, cast

from ._fake_policy import Decoding
from ._loopback import Exchange
from ._policy_server import PolicyServer, Refused, Route, check_fields

__all__ = ["VllmServer"]

_FIELDS = (
    "request_id",
    "token_ids",
    "sampling_params",
    "model",
    "stream",
    "cache_salt",
)
_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
    "stream_interval",
    "logit_bias",
)


_BOUNDS = (
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, math.inf),
    ("min_p", 0, 1),
    ("stream_interval", 1, math.inf),
)


class VllmServer(PolicyServer):
    """A vLLM that misbehaves as it is told.

    Args:
        dev_mode: Whether it was started with VLLM_SERVER_DEV_MODE=1.
        scale_out: Whether it was started with --enable-scale-out.
        sleep_mode: Whether it was started with --enable-sleep-mode.
        logprobs_mode: Its --logprobs-mode.
        options: Of `PolicyServer`.

    Attributes:
        asleep: What has no memory: `"weights"`, `"kv_cache"`.
    """

    generates = "/inference/v1/generate"

    def __init__(
        self,
        *,
        dev_mode: bool = True,
        scale_out: bool = True,
        sleep_mode: bool = True,
        logprobs_mode: str = "processed_logprobs",
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
        self._dev_mode = dev_mode
        self._scale_out = scale_out
        self._sleep_mode = sleep_mode
        self._logprobs_mode = logprobs_mode
        self.asleep: set[str] = set()

    def protected(self, path: str) -> bool:
        """Its key guards these only."""
        return path.startswith(("/v1", "/inference"))

    def begin(self, exchange: Exchange, body: dict[str, Any]) -> Decoding:
        """Checks a request as vLLM does; fields that it does not know it would ignore, and are refused here."""
        if not self._scale_out:
            raise Refused(
                403,
                _error(
                    "The scale-out API is not enabled. Start the server with --enable-scale-out",
                    403,
                ),
            )
        check_fields(body, _FIELDS, "the request")
        sampling: dict[str, Any] = body.get("sampling_params") or {}
        ids: list[int] = body.get("token_ids") or []
        check_fields(sampling, _SAMPLING, "sampling_params")
        if wrong := next(self._wrong(body, ids, sampling), None):
            raise Refused(400, _error(wrong, 400))
        most: int = sampling.get("max_tokens", 16)
        name = exchange.request.headers.get("x-request-id") or body.get("request_id", "random")
        return Decoding(
            f"generate-tokens-{name}",
            ids,
            max_tokens=most,
            min_tokens=sampling.get("min_tokens", 0),
            stop_ids=sampling.get("stop_token_ids", ()),
            cache=body.get("cache_salt", ""),
        )

    def _wrong(self, body: dict[str, Any], ids: Any, sampling: dict[str, Any]) -> Iterator[str]:
        """What vLLM would say to a bad request, and to `max_tokens` beyond its context, which it would cut."""
        vocab, context = self.policy.vocab_size, self.policy.max_context
        if not sampling or not ids:
            yield "token_ids and sampling_params are required"
        given = cast("Sequence[Any]", ids if isinstance(ids, list) else [None])
        if not all(isinstance(i, int) for i in given):
            yield "token_ids must be integers"
        for token in sampling.get("logit_bias", {}):
            if int(token) >= vocab:
                yield (
                    f"token_id(s) [{token}] in logit_bias contain out-of-vocab token ids. "
                    f"Vocabulary size: {vocab} (parameter=logit_bias, value=[{token}])"
                )
        if max(given) >= vocab or min(given) < 0:
            yield f"Token id {max(given)} is out of vocabulary"
        if body.get("cache_salt") == "":
            yield "cache_salt must not be empty"
        for name, least, most in _BOUNDS:
            value = sampling.get(name)
            if value is not None and (
                not isinstance(value, int | float) or not least <= value <= most
            ):
                yield f"{name} must be in [{least}, {most}], got {value!r}"
        most = sampling.get("max_tokens", 16)
        if sampling.get("min_tokens", 0) > most:
            yield f"min_tokens must be less than or equal to max_tokens={most}"
        if len(given) + most > context:
            yield "the prompt and max_tokens exceed max_model_len"
        if sampling.get("logprobs") != 0:
            yield "only logprobs=0 is played here"
        if sampling.get("top_p") == 0:
            yield "top_p must be in (0, 1], got 0"
        if not all(sampling.get("stop", ())):
            yield "stop cannot contain an empty string."
        if not all(isinstance(i, int) for i in sampling.get("stop_token_ids", ())):
            yield "stop_token_ids must contain only integers"

    def every(self, body: dict[str, Any]) -> int:
        """Its `stream_interval`."""
        interval: int = body["sampling_params"].get("stream_interval", 1)
        return interval

    def whole(self, decoding: Decoding) -> Any:
        """Its answer, with the version spans."""
        prompt, count = len(decoding.prompt), len(decoding.ids)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        return {
            "request_id": decoding.id,
            "model": "fake",
            "created": 0,
            "usage": usage,
            "choices": [self._choice(decoding, 0)],
        }

    def part(self, decoding: Decoding, start: int) -> Any:
        """A delta; version spans come with the last one only."""
        return {
            "request_id": decoding.id,
            "usage": None,
            "choices": [self._choice(decoding, start)],
        }

    def _choice(self, decoding: Decoding, start: int) -> dict[str, Any]:
        pairs = list(zip(decoding.ids, decoding.logprobs, strict=True))[start:]
        spans = [{"version": v, "start": a, "end": b} for v, a, b in decoding.spans]
        return {
            "index": 0,
            "token_ids": [token for token, _ in pairs],
            "finish_reason": decoding.finish,
            "stop_reason": None,
            "routed_experts": None,
            "weight_versions": spans if decoding.finish is not None else None,
            "logprobs": {
                "content": [
                    {
                        "token_id": token,
                        "logprob": logprob,
                        "rank": 1,
                        "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 1}],
                    }
                    for token, logprob in pairs
                ]
            },
        }

    def routes(self) -> dict[str, Route]:
        """Its control calls; most need the dev mode."""
        known: dict[str, Route] = {"GET /health": self._health, "GET /metrics": self._metrics}
        if self._dev_mode:
            known |= {
                "GET /server_info": self._info,
                "GET /weight_info": self._weight_info,
                "GET /is_paused": self._is_paused,
                "POST /pause": self._pause,
                "POST /resume": self._resume,
                "POST /abort_requests": self._abort,
                "POST /collective_rpc": self._rpc,
                "POST /update_weight_version": self._label,
                "POST /reset_prefix_cache": self._reset,
                "POST /sleep": self._sleep,
                "POST /wake_up": self._wake,
                "POST /release_kv_cache_memory": self._release_cache,
            }
        return known

    async def _health(self, exchange: Exchange) -> Any:
        return b""

    async def _metrics(self, exchange: Exchange) -> Any:
        waiting = sum(decoding.waiting for decoding in self.policy.decodings.values())
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            f'vllm:num_requests_running{{engine="0"}} {len(self.policy.decodings) - waiting}.0',
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        ]
        return "\n".join([*lines, ""]).encode()

    async def _info(self, exchange: Exchange) -> Any:
        if exchange.request.query.get("config_format") != "json":
            return {"vllm_config": "as text"}
        model = {
            "max_model_len": self.policy.max_context,
            "logprobs_mode": self._logprobs_mode,
            "generation_config": "vllm",
            "enable_sleep_mode": self._sleep_mode,
        }
        return {"vllm_config": {"model_config": model}, "vllm_env": {}, "system_env": {}}

    async def _weight_info(self, exchange: Exchange) -> Any:
        return {"weight_version": self.policy.label}

    async def _is_paused(self, exchange: Exchange) -> Any:
        return {"is_paused": self.policy.paused is not None}

    async def _pause(self, exchange: Exchange) -> Any:
        query = exchange.request.query
        mode = query.get("mode", "abort")
        if mode not in ("abort", "keep"):
            raise Refused(400, {"error": f"Invalid pause mode: {mode}"})
        self.policy.pause(mode)
        if query.get("clear_cache", "true") == "true":
            self.policy.forget(running=True)
        return {"status": "paused"}

    async def _resume(self, exchange: Exchange) -> Any:
        if self.asleep:
            raise Refused(500, {"error": "Failed to resume generation: asleep"})
        self.policy.resume()
        return {"status": "resumed"}

    async def _abort(self, exchange: Exchange) -> Any:
        ids: list[str] = exchange.request.json().get("request_ids") or []
        self.aborts.append(ids or None)
        held = self.policy.decodings
        self.policy.abort([held[i] for i in ids if i in held] if ids else held.values())
        return {"status": "aborted", "aborted": len(ids)}

    async def _rpc(self, exchange: Exchange) -> Any:
        body = exchange.request.json()
        path = body.get("kwargs", {}).get("weights_path")
        if body.get("method") != "reload_weights" or path not in self.policy.models:
            raise Refused(500, _error(f"Call to collective_rpc method failed: {path!r}", 500))
        if "weights" in self.asleep:
            raise Refused(500, _error("the weights are asleep", 500))
        self.policy.load(path)
        return {"results": [None]}

    async def _label(self, exchange: Exchange) -> Any:
        label = exchange.request.json()["new_version"]
        if not isinstance(label, str):
            raise Refused(422, _error("new_version must be a string", 422))
        self.policy.label = label
        return {"success": True, "new_version": label}

    async def _reset(self, exchange: Exchange) -> Any:
        running = exchange.request.query.get("reset_running_requests") == "true"
        return {"success": self.policy.forget(running=running)}

    async def _sleep(self, exchange: Exchange) -> Any:
        if not self._sleep_mode:
            raise Refused(500, _error("sleep mode is not enabled", 500))
        self.policy.pause(exchange.request.query.get("mode", "abort"))
        self.policy.forget(running=True)
        self.asleep = {"weights", "kv_cache"}
        return {"status": "sleeping", "level": 1}

    async def _release_cache(self, exchange: Exchange) -> Any:
        if self.policy.paused is None or self.policy.decodings or self.asleep:
            raise Refused(500, _error("requires a completed pause first", 500))
        self.policy.forget(running=True)
        self.asleep.add("kv_cache")
        return {"status": "kv_cache_released"}

    async def _wake(self, exchange: Exchange) -> Any:
        tag = exchange.request.query.get("tags")
        self.asleep -= {"weights", "kv_cache"} if tag is None else {tag}
        if not self.asleep:
            self.policy.resume()  # whether that was wanted or not
        return {"status": "sleeping" if self.asleep else "awake", "tags": tag}


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}
