"""Which worker holds which prefix in which tier: the radix tree, kept by KV events or by prediction.

`reference` is the Python tree that the native one is tested against.
"""
