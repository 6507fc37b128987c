"""Penstock: serve large language models on many workers behind one endpoint."""

__version__ = "0.1.0"
