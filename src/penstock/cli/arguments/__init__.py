"""The parser of all commands, and the flags that several of them have."""
