"""Data loading: sampler, batching, worker processes, prefetching."""
