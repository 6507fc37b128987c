"""Limits on clients: certificate and API keys, requests in flight, time, body sizes, and what their headers may say."""
