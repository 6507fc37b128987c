"""Floor 7: composition roots: processes on this machine."""
