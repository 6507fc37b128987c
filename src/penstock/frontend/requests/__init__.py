"""One API request: prepares engine requests and block hashes, and turns deltas into the answer.

Encoder processes prepare large bodies.
"""
