"""Reports of a simulation: JSON, table, charts, HTML page."""
