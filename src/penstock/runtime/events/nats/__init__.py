"""NATS as the carrier of KV events and load reports."""
