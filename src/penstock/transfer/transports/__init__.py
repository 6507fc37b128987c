"""One transport a way for bytes: memory, shm, tcp, nixl.

A transport only moves bytes between ranges; links, retries and the choice of a transport are above it.
"""
