"""A program on a cluster: its time, memory and failures, by arithmetic on plain data."""
