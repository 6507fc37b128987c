"""Floor 4: one Worker drives any engine and serves it to frontends."""
