"""What other frameworks run otherwise than XLA, as changes of a program."""
