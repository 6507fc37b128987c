"""What a supervisor answers: commands and planners that scale it, on a Unix socket in its private directory, and probes by HTTP."""
