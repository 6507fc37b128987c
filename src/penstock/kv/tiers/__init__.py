"""KV tiers: a device's block pool with lower tiers below it.

A block that one tier evicts is kept in the next tier, and onboarded again when a request needs it.
"""
