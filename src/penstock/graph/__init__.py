"""Floor 6: the deployment as data."""
