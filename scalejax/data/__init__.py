"""Data sets as examples by index, and their global batches."""
