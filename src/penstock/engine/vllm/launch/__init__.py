"""Starts vLLM: converts a spec to vLLM's arguments and environment, and starts its processes."""
