"""The supervisor of a node that follows: one process, without a registry or a worker."""
