"""Tenants: their API keys, and what each may use at once and over time."""
