"""Registered memory: regions, lists of ranges in them, copies and checksums.

Nothing here knows a peer but `quarantine`, which keeps memory until its peers are done with it.
"""
