"""Limits on clients: keys and tenants, requests in flight, time, body sizes, and what their headers may say."""
