"""KV in messages: how it lies in memory, how it is handed over, and what is asked of it by hand."""
