"""What a `run.toml` says: pure dataclasses, and what their words alone contradict."""
