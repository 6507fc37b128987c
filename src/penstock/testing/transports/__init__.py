"""The conformance suite of transports, between agents and to storage."""
