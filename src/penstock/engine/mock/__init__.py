"""An engine without a model: real scheduling, blocks and KV events; step times from a formula."""
