"""One API request: to engine requests and block hashes, and from deltas back to an answer.

Large bodies are encoded in processes of their own.
"""
