"""The blocks of one tier: who holds them, which prefix each caches, which goes first.

`reference` is the Python pool that the native one is tested against.
"""
