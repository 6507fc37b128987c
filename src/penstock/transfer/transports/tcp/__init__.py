"""Transport `tcp`: sockets, straight from memory and into memory."""
