"""The control channel of a deployment: a Unix socket in its private directory, by which commands and planners scale it."""
