"""`penstock doctor`: tests which transports work on this host between which memories, how fast, and why others do not."""
