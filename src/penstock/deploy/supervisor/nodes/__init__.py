"""The supervisor of a follower: one process, without a registry or a worker."""
