"""Simulated engines: one that jumps from event to event, and one exact to the token."""
