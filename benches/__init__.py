"""Benches: each prints ratios from one run, with raw samples as `--json`. No test is timed; speed lives here."""
