"""Decisions kept as arrays, explained in words, and replayed from logs."""
