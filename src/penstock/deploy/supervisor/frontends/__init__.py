"""The frontends of this host: the port that they share, and their processes."""
