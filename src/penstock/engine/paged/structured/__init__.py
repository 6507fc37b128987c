"""Structured output: grammars compiled on a thread of their own, and token masks for the sampler. Needs llguidance."""
