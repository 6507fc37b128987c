"""Device blocks with lower tiers beneath them.

What one tier gives up the next one keeps, and brings back before a request is computed.
"""
