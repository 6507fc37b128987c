"""KV tiers for an engine with a scheduler of its own: its scheduler matches, reserves and commits; its device processes load and save.

Both sides exchange `Orders` and `Report`s with the messages of the engine's own steps.
"""
