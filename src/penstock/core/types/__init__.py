"""What crosses a process boundary: requests, steps, KV events, load, registrations.

One file a subject; each message is a frozen struct that only gains fields, last and with defaults.
"""
