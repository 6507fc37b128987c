"""One worker as this router knows it: its state, its load, what its work takes."""
