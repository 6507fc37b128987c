"""The child processes: a frontend or a worker, from its start to its end."""
