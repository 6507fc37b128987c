"""vLLM behind Penstock, beside vLLM's own server. Runs by the Python of an environment with vLLM and Penstock."""
