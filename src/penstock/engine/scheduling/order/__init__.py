"""The order of a scheduler's prompts: as they came, shortest first, or in turns of tenants."""
