"""Faults by plan or seed, and what must hold through them."""
