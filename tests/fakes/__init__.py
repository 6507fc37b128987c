"""Stand-ins for engines' packages: they keep the documented contract of the API, over the mock engine."""
