"""A server that speaks as SGLang 0.5.23 does, by its source; where it is stricter, that is said."""

from __future__ import annotations

import ssl
from typing import Any

from ._fake_policy import Decoding
from ._loopback import Exchange
from ._policy_server import PolicyServer, Refused, Route, check_fields

__all__ = ["SglangServer"]

_FIELDS = (
    "rid",
    "input_ids",
    "sampling_params",
    "stream",
    "return_logprob",
    "logprob_start_len",
    "token_ids_logprob",
    "extra_key",
)
_SAMPLING = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "sampling_seed",
    "stream_interval",
)


class SglangServer(PolicyServer):
    """An SGLang that misbehaves as it is told.

    Args:
        incremental: Whether it was started with --incremental-streaming-output.
        deterministic: Whether it was started with --enable-deterministic-inference.
        memory_saver: Whether it was started with --enable-memory-saver and --enable-weights-cpu-backup.
        options: Of `PolicyServer`.

    Attributes:
        asleep: What has no memory: `"weights"`, `"kv_cache"`.
    """

    generates = "/generate"

    def __init__(
        self,
        *,
        incremental: bool = True,
        deterministic: bool = False,
        memory_saver: bool = True,
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
        self._incremental = incremental
        self._deterministic = deterministic
        self._memory_saver = memory_saver
        self.asleep: set[str] = set()

    def begin(self, exchange: Exchange, body: dict[str, Any]) -> Decoding:
        """Checks a request as SGLang does, which refuses fields of `sampling_params` that it does not know."""
        check_fields(body, _FIELDS, "the request")
        sampling: dict[str, Any] = body.get("sampling_params") or {}
        check_fields(sampling, _SAMPLING, "sampling_params")
        vocab = self.policy.vocab_size
        for token in body.get("token_ids_logprob", ()):
            if not 0 <= token < vocab:
                raise Refused(
                    400,
                    _error(
                        f"token_ids_logprob contains out-of-vocabulary token id {token}; "
                        f"valid range is [0, {vocab})."
                    ),
                )
        ids: list[int] = body.get("input_ids") or []
        if not ids or max(ids) >= vocab or min(ids) < 0:
            raise Refused(400, _error("input_ids are empty or out of vocabulary"))
        if sampling.get("top_k") == 0:
            raise Refused(400, _error("top_k must be -1 (disable), or at least 1, got 0."))
        most = sampling.get("max_new_tokens", 128)
        if most < 1 or len(ids) + most > self.policy.max_context:
            raise Refused(400, _error(f"max_new_tokens {most} does not fit"))
        if not body.get("return_logprob") or body.get("logprob_start_len") != -1:
            raise Refused(400, _error("only logprobs of the output are played here"))
        if sampling.get("sampling_seed") is None and self._deterministic:
            raise Refused(400, _error("a request without a seed would get 42"))
        rid = body.get("rid", "random")
        if rid in self.policy.decodings:
            raise Refused(400, _error(f"Duplicate request ID detected: {rid}"))
        return Decoding(
            rid,
            ids,
            max_tokens=most,
            min_tokens=sampling.get("min_new_tokens", 0),
            stop_ids=sampling.get("stop_token_ids", ()),
            cache=body.get("extra_key", ""),
        )

    async def admit(self, decoding: Decoding) -> None:
        """Parks it in the HTTP process while paused, where no abort finds it."""
        while self.policy.paused is not None:
            await self.policy.resumed.wait()

    def every(self, body: dict[str, Any]) -> int:
        """Its `stream_interval`."""
        interval: int = body["sampling_params"].get("stream_interval", 1)
        return interval

    def whole(self, decoding: Decoding) -> Any:
        """Its answer, with the version spans."""
        return self._reply(decoding, 0)

    def part(self, decoding: Decoding, start: int) -> Any:
        """A delta with --incremental-streaming-output, everything so far without."""
        if not self._incremental:
            start = 0
        elif decoding.finish == "abort" and start == len(decoding.ids) and start:
            start -= 1  # it says its last token again
        return self._reply(decoding, start)

    def _reply(self, decoding: Decoding, start: int) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if decoding.finish is not None:
            reason = {"type": decoding.finish}
            if decoding.finish == "stop":
                reason["matched"] = decoding.ids[-1]
            elif decoding.finish == "length":
                reason["length"] = len(decoding.ids)
            else:
                reason["message"] = "Abort before prefill" if decoding.waiting else "Aborted"
        pairs = list(zip(decoding.logprobs, decoding.ids, strict=True))[start:]
        spans = [{"version": v, "start": a, "end": b} for v, a, b in decoding.spans]
        return {
            "text": "",
            "output_ids": decoding.ids[start:],
            "meta_info": {
                "id": decoding.id,
                "finish_reason": reason,
                "prompt_tokens": len(decoding.prompt),
                "completion_tokens": len(decoding.ids),
                "cached_tokens": 0,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
                "weight_version": self.policy.label,
                "weight_versions": spans,
                "e2e_latency": 0.0,
            },
        }

    def routes(self) -> dict[str, Route]:
        """Its control calls."""
        return {
            "GET /health": self._health,
            "GET /server_info": self._info,
            "GET /model_info": self._model_info,
            "GET /v1/models": self._models,
            "GET /v1/loads": self._loads,
            "POST /abort_request": self._abort,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /update_weights_from_disk": self._update,
            "POST /update_weight_version": self._label,
            "POST /flush_cache": self._flush,
            "POST /release_memory_occupation": self._release,
            "POST /resume_memory_occupation": self._take,
        }

    async def _health(self, exchange: Exchange) -> Any:
        await self.admit(Decoding("", [], max_tokens=1))  # it generates a token
        return b""

    async def _info(self, exchange: Exchange) -> Any:
        return {
            "incremental_streaming_output": self._incremental,
            "enable_deterministic_inference": self._deterministic,
            "enable_memory_saver": self._memory_saver,
            "enable_weights_cpu_backup": self._memory_saver,
            "version": "0.5.23",
        }

    async def _model_info(self, exchange: Exchange) -> Any:
        return {"model_path": "/models/base", "weight_version": self.policy.label}

    async def _models(self, exchange: Exchange) -> Any:
        return {"data": [{"id": "fake", "max_model_len": self.policy.max_context}]}

    async def _loads(self, exchange: Exchange) -> Any:
        waiting = sum(decoding.waiting for decoding in self.policy.decodings.values())
        running = len(self.policy.decodings) - waiting
        load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.25}
        return {"loads": [{"dp_rank": 0, **load}]}

    async def _abort(self, exchange: Exchange) -> Any:
        body = exchange.request.json()
        rid, everything = body.get("rid", ""), body.get("abort_all", False)
        self.aborts.append(None if everything else [rid])
        held = self.policy.decodings.values()
        if everything:
            self.policy.abort(held)
        elif rid:
            self.policy.abort([one for one in held if one.id.startswith(rid)])
        return b""

    async def _pause(self, exchange: Exchange) -> Any:
        mode = exchange.request.json().get("mode", "abort")
        if mode not in ("abort", "retract"):
            raise Refused(400, _error(f"mode {mode!r} is not played here"))
        self.policy.pause("abort" if mode == "abort" else "keep")
        return {"status": "ok"}

    async def _continue(self, exchange: Exchange) -> Any:
        exchange.request.json()
        self.policy.resume()
        return {"status": "ok"}

    async def _update(self, exchange: Exchange) -> Any:
        body = exchange.request.json()
        path = body["model_path"]
        if path not in self.policy.models or "weights" in self.asleep:
            raise Refused(400, {"success": False, "message": f"can't load {path!r}"})
        self.policy.load(path)
        if body.get("weight_version") is not None:
            self.policy.label = body["weight_version"]
        if body.get("abort_all_requests", False):
            self.policy.abort(self.policy.decodings.values())
        if body.get("flush_cache", True):
            await self._flush(exchange)
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def _label(self, exchange: Exchange) -> Any:
        body = exchange.request.json()
        if body.get("abort_all_requests", True):
            self.policy.abort(self.policy.decodings.values())
        self.policy.label = body["new_version"]
        return {"success": True, "new_version": self.policy.label}

    async def _flush(self, exchange: Exchange) -> Any:
        if self.policy.decodings and self.policy.paused is None:
            raise Refused(400, {"success": False, "message": "requests are running"})
        self.policy.forget(running=True)
        return b"Cache flushed."

    async def _release(self, exchange: Exchange) -> Any:
        if not self._memory_saver or self.policy.decodings:
            raise Refused(400, _error("no memory saver, or not idle"))
        self.asleep |= set(exchange.request.json()["tags"])
        self.policy.forget(running=True)
        return b""

    async def _take(self, exchange: Exchange) -> Any:
        self.asleep -= set(exchange.request.json()["tags"])
        return b""


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequest", "code": 400}}
