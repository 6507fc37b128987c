"""Floor 7: runs a graph as processes on this machine."""
