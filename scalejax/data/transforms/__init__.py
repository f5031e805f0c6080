"""What is done to an example before it is in a batch."""
