"""Limits on clients: API keys, requests in flight, time, body sizes."""
