"""What requests say about KV, and what it saves: kinds, priorities, tenants' shares."""

from benchmarks.kv.retention.command import add_arguments, run

__all__ = ["add_arguments", "run"]
