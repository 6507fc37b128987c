"""Prices from measurements: points of a real engine, and how far they can be trusted."""
