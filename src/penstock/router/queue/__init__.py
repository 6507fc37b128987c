"""Where requests wait while every worker has enough to do."""
