"""Which devices and batch reach a target soonest, and which cheapest."""
