"""Floor 2: how processes find and call each other: discovery, request plane, KV events."""
