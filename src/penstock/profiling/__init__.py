"""`penstock profile`: measures an engine or endpoint, fits the latency model and reports its accuracy."""
