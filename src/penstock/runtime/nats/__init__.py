"""NATS as discovery and events use it: one connection at a time, made again after every failure."""
