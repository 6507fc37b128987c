"""What stands in each table of the docs, made from benchmarks/results."""
