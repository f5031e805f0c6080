"""How fast this host makes batches."""
