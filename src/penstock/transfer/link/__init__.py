"""Links between agents: listening, handshake, metadata, frames.

A link carries what agents say to each other; the bytes of a transfer go by a transport.
"""
