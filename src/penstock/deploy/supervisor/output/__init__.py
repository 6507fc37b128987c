"""What the processes of a deployment print: passed on, and kept in a bounded file for `penstock logs`."""
