"""Floor 8: which deployment to make of so many devices: searched by the latency model, confirmed by the simulator."""
