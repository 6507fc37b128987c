"""Floor 8: the simulator: the real router and workers on virtual time, with simulated engines and networks."""
