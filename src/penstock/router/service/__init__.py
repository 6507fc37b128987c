"""The router alone, for gateways that send requests to servers themselves."""
