"""A transfer from its post to its end: peer, transport chosen, handle, lists made ready."""
