"""What requests, sessions and operators say about KV, and what it saves: kinds, priorities, pins with a TTL, tenants' shares."""

from benchmarks.kv.retention.command import add_arguments, run

__all__ = ["add_arguments", "run"]
