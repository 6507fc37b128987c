"""The conformance suite of engines: answers, KV blocks, partial blocks."""
