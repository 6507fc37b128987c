"""The commands `penstock serve`, `router`, `role` and `explain`."""
