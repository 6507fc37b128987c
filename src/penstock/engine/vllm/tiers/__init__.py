"""KV tiers below vLLM's device: a connector that vLLM imports in its own processes, and what the worker hears of it."""
