"""Processes of a worker over several nodes: the leader's gathers the followers, a follower's runs the engine's processes of its node."""
