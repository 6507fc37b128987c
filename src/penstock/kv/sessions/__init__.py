"""Sessions of agents: KV that an engine keeps on its device between the requests of one session."""
