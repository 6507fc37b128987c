"""Blocks in files and object stores, each checked against its checksum, and the regions of an agent over them."""
