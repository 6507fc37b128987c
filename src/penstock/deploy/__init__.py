"""Floor 8: runs a graph as processes on this machine."""
