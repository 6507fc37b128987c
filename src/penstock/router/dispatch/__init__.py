"""A request from its arrival to its last token, over any number of workers."""
