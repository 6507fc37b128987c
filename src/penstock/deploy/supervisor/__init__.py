"""The supervisor of one machine: members, their processes, port, cores and devices."""
