"""Blocks of layers with a sliding window in one pool with those of the whole context: tables of running requests, cached prefixes, pins.

A block of the pool has the bytes of one group's layers, whichever group it is taken for.
"""
