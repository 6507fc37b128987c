"""Floor 2: everything priced in seconds: roofline, measured profile, online correction."""
