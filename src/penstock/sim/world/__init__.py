"""Simulated hosts: network, request plane, discovery and KV transport, with real routers and workers on them."""
