"""Registered memory: regions, lists of ranges in them, copies and checksums.

Only `quarantine` knows of peers: it keeps memory alive until they have released it.
"""
