"""The simulated cluster: hosts, network, request plane, discovery and KV transport, under real routers and workers."""
