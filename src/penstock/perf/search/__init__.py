"""Searches the best layout of N devices with closed-form predictions."""
