"""What a simulation came to: figures, tables, charts, one HTML page."""
