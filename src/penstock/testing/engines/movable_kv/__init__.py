"""Suites of engines whose KV Penstock moves."""
