"""The conformance suites of discovery, request plane and KV events."""
