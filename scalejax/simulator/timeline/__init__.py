"""Timeline of a step on compute and communication streams, and attribution of its seconds."""
