"""Floor 11: `penstock bench`: load on a running server; each bench writes one JSON of a common schema (`report.py`).

Experiments on Penstock itself are in the repository's `benchmarks`, outside the wheel.
"""

from penstock.bench.registry import BENCHES

__all__ = ["BENCHES"]
