"""TensorRT-LLM's `LLM`, in the worker's process; its ranks are processes of their own.

Written against the LLM API of 1.1, and tested against a fake that keeps it: nobody has run it on a GPU here.
"""
