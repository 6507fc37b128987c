"""What is profiled: an engine in this process, or an OpenAI-compatible endpoint by URL.

A target runs prefill and decode cells and gives their seconds; it fits nothing.
"""
