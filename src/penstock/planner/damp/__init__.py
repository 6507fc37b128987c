"""Keeps decisions from oscillating: bounds, cool-downs, pending replicas, and masks of cold workers."""
