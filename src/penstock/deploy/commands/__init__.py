"""What `penstock serve`, `router`, `role` and `explain` do."""
