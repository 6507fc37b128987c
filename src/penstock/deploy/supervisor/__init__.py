"""The supervisor of one machine: starts and restarts processes, assigns port, CPU cores and devices."""
