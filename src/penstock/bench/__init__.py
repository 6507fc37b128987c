"""Floor 10: what `penstock bench` runs; every bench writes one JSON of one schema (`report.py`)."""

from penstock.bench.registry import add_parsers

__all__ = ["add_parsers"]
