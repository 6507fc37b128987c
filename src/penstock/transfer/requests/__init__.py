"""Transfer requests from post to end: peer, prepared lists, choice of a transport, handle."""
