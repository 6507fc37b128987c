"""The workers of one machine as a pool that grows and shrinks, and the file that remembers it."""
