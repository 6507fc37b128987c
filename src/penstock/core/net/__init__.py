"""Connections between processes: addresses, sockets, frames, heartbeats.

Blind to what the messages say.
"""
