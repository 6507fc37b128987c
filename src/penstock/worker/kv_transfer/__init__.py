"""KV from one worker to another: blocks exported, pulled, and held until they were read.

Written once for all engines; the engine only names its blocks and their memory.
"""
