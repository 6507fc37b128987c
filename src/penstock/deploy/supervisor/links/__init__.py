"""The links of this host to other regions: a process for each."""
