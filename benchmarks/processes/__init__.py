"""Real processes of `penstock serve` under load, and the paged engine beside a plain generate loop."""
