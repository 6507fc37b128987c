"""What each step of an engine computes: queue, admission, batch slots, sequences.

Blind to models and devices: the scheduler knows tokens and blocks.
"""
