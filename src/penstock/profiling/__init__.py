"""What `penstock profile` does: sweep an engine or an endpoint, fit the latency model, say how far it can be trusted."""
