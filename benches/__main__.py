"""Runs all benches and writes `benches/results/*.json`: `python -m benches [--quick]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benches import memory, overhead, pause_latency, wakeup
from benches.harness import main

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benches")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    quick = ["--quick"] if parser.parse_args().quick else []
    for bench in (pause_latency, wakeup, overhead, memory):
        name = bench.__name__.rpartition(".")[2]
        main(name, bench.run, ["--json", str(RESULTS / f"{name}.json"), *quick])
