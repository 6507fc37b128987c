"""What `penstock doctor` runs: which transports work here, between which memories and how fast, and why others do not."""
