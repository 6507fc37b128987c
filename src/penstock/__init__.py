"""Penstock: serve large language models on many machines as if they were one."""

__version__ = "0.1.0"
