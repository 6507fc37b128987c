"""How a worker is chosen: each policy prices a request on every worker at once."""
