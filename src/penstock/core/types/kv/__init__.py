"""KV in messages: how it lies in memory, how workers exchange it, and what operators ask of it."""
