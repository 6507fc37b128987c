"""The block pool of one tier: references, prefix cache, eviction, pins.

`reference` is the Python pool that the native one is tested against.
"""
