"""Plans of time to target: which cluster, device count and batch are soonest or cheapest."""
