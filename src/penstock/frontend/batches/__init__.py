"""Files and batches: requests of a JSONL file that run in the gaps between others, and survive a restart.

Everything is in one directory that the frontends of a deployment share; the one that holds a batch's lock runs it.
"""
