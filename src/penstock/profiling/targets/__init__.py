"""Targets of a profile: an engine in this process, or an OpenAI-compatible endpoint by URL.

A target measures prefill and decode cells; it fits nothing.
"""
