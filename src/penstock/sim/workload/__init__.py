"""Workloads: traces, synthetic sessions, prompts without text."""
