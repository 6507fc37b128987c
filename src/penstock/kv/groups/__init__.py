"""Groups of a model's layers that need different blocks of a prefix: all of them, or those of the last window.

Tiers keep blocks and know no groups: a group's block has a name of its own, made from the prompt's block hash.
"""
