"""Transport `tcp`: sockets, without a copy between socket and memory."""
