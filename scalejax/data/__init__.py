"""Data sets as examples by index, and the global batches made of them."""
