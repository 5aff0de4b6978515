"""Adapters that join rollnest to policies, servers and trainers; each module needs its own extra."""
