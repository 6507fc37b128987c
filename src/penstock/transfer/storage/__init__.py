"""Regions on disk and in object stores, each block checked against its checksum.

A slab is a file that is read and written like memory; a stored object is put as a whole.
"""
