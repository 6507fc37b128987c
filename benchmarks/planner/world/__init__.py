"""The deployment that strategies scale: simulated workers, step by step, behind a scaling connector."""
