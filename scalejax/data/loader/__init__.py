"""Examples as global batches: order, batching, worker processes, prefetching."""
