"""The streams of a step: what runs beside what, and to which cause its seconds are attributed."""
