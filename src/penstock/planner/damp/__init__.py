"""Keeps decisions from oscillating: bounds, hysteresis, cool-downs, pending replicas, and masks of cold workers."""
