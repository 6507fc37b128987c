"""Floor 2: latency models: roofline, measured profile, online correction."""
