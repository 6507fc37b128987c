"""An engine without a model: honest scheduling, blocks and events, time from a formula."""
