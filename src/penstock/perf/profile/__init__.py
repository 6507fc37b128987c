"""Latency models from measurements of a real engine, with their accuracy."""
