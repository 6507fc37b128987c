"""Transports between agents: memory, shm, tcp, nixl.

A transport only moves bytes between ranges. Links carry control; `requests` chooses transports and retries.
"""
