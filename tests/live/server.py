"""A vLLM process: started, waited for, killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

import httpx2

from tests.vllm_requests import MAX_CONTEXT

from .place import MODELS, PLACE, PYTHON, LiveError

__all__ = ["OPTIONS", "Vllm", "free_port"]

OPTIONS = (
    "--enable-scale-out",
    "--generation-config",
    "vllm",
    "--logprobs-mode",
    "processed_logprobs",
)
"""Those that rollnest needs."""

_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {
        "out": {
            "class": "logging.StreamHandler",
            "stream": "ext://sys.stdout",
            "formatter": "plain",
        }
    },
    "loggers": {
        "vllm": {"handlers": ["out"], "level": "INFO", "propagate": False},
        # Only this one says which ids a request continues.
        "vllm.entrypoints.serve.utils.request_logger": {"level": "DEBUG"},
    },
}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Vllm:
    """A vLLM server on a loopback port, in a process of its own.

    Args:
        port: Where it listens.
        options: Options of the server.
        dev_mode: Whether it has its control routes.
        dtype: What it computes in.

    Attributes:
        url: Its root.
    """

    def __init__(
        self,
        port: int,
        *,
        options: Sequence[str] = OPTIONS,
        dev_mode: bool = True,
        dtype: str = "bfloat16",
    ) -> None:
        self.url: str = f"http://127.0.0.1:{port}"
        self._log = PLACE / f"vllm-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        logging = PLACE / "logging.json"
        logging.write_text(json.dumps(_LOGGING))
        self._environment = {
            **os.environ,
            "VLLM_LOGGING_CONFIG_PATH": str(logging),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0",
        }
        self._environment.pop("PYTHONPATH", None)  # the project's packages are none of its business
        self._command = [
            str(PYTHON),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(MODELS[0]), "--served-model-name", "smol"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(MAX_CONTEXT), "--dtype", dtype, "--enforce-eager"),
            "--enable-log-requests",
            *options,
        ]

    def __enter__(self) -> Vllm:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it, and returns when it serves: after some 70 seconds on two idle cores.

        Raises:
            LiveError: It ended before.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=PLACE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(self._process)
        except BaseException:  # whoever gives up waiting has no server to end
            self.kill()
            raise

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        while not self.serves():
            if process.poll() is not None:
                raise LiveError(
                    f"vLLM exited with {process.returncode}; see {self._log}:\n{self._tail()}"
                )
            time.sleep(0.5)

    def serves(self) -> bool:
        """Whether it answers."""
        try:
            return httpx2.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx2.HTTPError:
            return False

    def kill(self) -> None:
        """Ends it and its children at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def asked(self) -> dict[str, list[int]]:
        """Ids of the tokens that each request continued, by the request's id, as its log has them."""
        log = self._log.read_text(errors="replace")
        found = re.findall(
            r"Request generate-tokens-(\w+) details: .*?prompt_token_ids: (\[[\d, ]*\])", log
        )
        return {id_: json.loads(ids) for id_, ids in found}

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]
