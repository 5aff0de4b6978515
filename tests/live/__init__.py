"""The suite against a real vLLM with a real model, on a plain CPU: `make live`."""
