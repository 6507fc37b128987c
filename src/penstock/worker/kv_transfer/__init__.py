"""KV transfer between workers: a prefill worker pins and exports blocks, a decode worker reads them.

Written once for all engines; an engine only provides block ids and their memory.
"""
