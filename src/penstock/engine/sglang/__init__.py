"""SGLang's `Engine`, in the worker's process; its scheduler and its ranks are processes of their own.

Written against the API of SGLang 0.5.23, and tested against a fake that keeps it: nobody has run it on a GPU here.
"""
