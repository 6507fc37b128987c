"""`penstock doctor`: which engines can run on this host, which transports work between which memories, how fast, and why others do not."""
