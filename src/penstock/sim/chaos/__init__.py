"""Fault injection by plan or seed, and the invariants that must hold."""
