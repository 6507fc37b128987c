"""Continuous batching: queue, admission, batch slots, sequences.

Independent of models and devices: the scheduler knows tokens and blocks only.
"""
