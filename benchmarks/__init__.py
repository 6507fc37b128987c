"""Experiments on Penstock: `python -m benchmarks NAME` runs one, and none is part of the wheel.

What users measure their own servers with is `penstock.bench`, which also writes the reports.
"""
