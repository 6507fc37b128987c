"""Links between agents: listening, handshake, metadata, frames.

A link carries control messages of two agents; transports move the bytes.
"""
