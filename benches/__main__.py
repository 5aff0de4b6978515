"""Runs all benches, writes `benches/results/*.json` and a picture of every goal.

    python -m benches                 everything, over half an hour
    python -m benches --quick         fewer and smaller cases, some minutes
    python -m benches --only wakeup   one of them; may be given again
    python -m benches --list          their names

Each bench runs in a process of its own, one after the other, so that none pays for another's garbage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.picture import draw

BENCHES = ("pause_latency", "wakeup", "overhead", "memory", "tail", "http", "save", "ray_scale")
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs them; 1 if one of them failed. A missed goal is no failure: the picture shows it."""
    parser = argparse.ArgumentParser(prog="python -m benches", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--only", action="append", choices=BENCHES, help="just this one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for the results")
    parser.add_argument("--list", action="store_true", help="print their names")
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write("\n".join([*BENCHES, ""]))
        return 0
    results: list[dict[str, Any]] = []
    for name in options.only or BENCHES:
        file: Path = options.out / f"{name}.json"
        command = [sys.executable, "-m", f"benches.{name}", "--json", str(file)]
        done = subprocess.run([*command, *(["--quick"] if options.quick else [])], check=False)
        if done.returncode:
            return 1
        results.append(json.loads(file.read_text(encoding="utf-8")))
    picture = options.out / "goals.svg"
    draw(results, picture)
    sys.stdout.write(f"{picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
