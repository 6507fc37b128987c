"""Reads what a model writes: reasoning, tool calls, and the text for the user.

A grammar (one per model family) is a generator over a `Source`; however the text is split, the same pieces come out.
"""
