"""Simulated engines: the jump engine, which skips from event to event, and the exact engine, its reference."""
