"""Simulates the next minutes before workers are taken away: recent requests, scaled to the forecast, on fewer workers."""
