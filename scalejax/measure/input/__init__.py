"""Input rates of this host: how fast it reads, decodes and batches examples."""
