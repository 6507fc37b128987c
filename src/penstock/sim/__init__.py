"""Floor 7: a virtual cluster. The real router and workers on virtual time, with simulated engines and networks."""
