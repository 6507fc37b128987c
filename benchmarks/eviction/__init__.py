"""Eviction policies side by side: the prefill seconds that one pool's cache saves, for an 8B model on an H100."""

from benchmarks.eviction.command import add_arguments, run

__all__ = ["add_arguments", "run"]
