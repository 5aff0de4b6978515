"""Installs what is missing, and runs the live suite: `make live ARGS=...`; arguments go to pytest."""

from __future__ import annotations

import subprocess
import sys

from .place import ROOT, LiveError, install, make_models, say


def main() -> int:
    """Returns the exit status: pytest's, or 3 if this machine can't run the suite."""
    try:
        install()
        make_models()
    except LiveError as error:
        say(f"make live: {error}")
        return 3
    command = [sys.executable, "-m", "pytest", "tests/live/live_vllm.py", "-v", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


sys.exit(main())
