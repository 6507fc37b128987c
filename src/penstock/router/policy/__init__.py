"""Routing policies: each prices a request on every worker at once."""
