"""Connections between processes: addresses, sockets, frames, heartbeats.

Independent of the content of messages.
"""
