"""Processes of a worker that spans several nodes: the leader's gathers the others, a follower's runs the engine's processes of its node."""
