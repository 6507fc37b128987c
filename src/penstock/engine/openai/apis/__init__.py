"""The HTTP APIs of servers: one file for each format of requests and streamed answers."""
