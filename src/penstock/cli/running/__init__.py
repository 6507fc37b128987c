"""Commands for a deployment that runs: they ask it, watch it or change it."""
