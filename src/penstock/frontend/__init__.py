"""Floor 6: the OpenAI-compatible HTTP server: decodes requests, prepares them and streams the answers."""
