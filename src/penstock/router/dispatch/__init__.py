"""A request from its arrival to its last token, whatever happens to its workers."""
