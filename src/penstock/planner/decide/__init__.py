"""Replicas of each role that an expected demand needs, from the latency model inverted under queueing."""
