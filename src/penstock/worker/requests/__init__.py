"""What a worker does with a request before its engine gets it: it checks it, and expands its media to tokens."""
