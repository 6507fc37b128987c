"""Counts what a process sees into windows for planners: a few additions for each request or step."""
