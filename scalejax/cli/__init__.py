"""The command line: `main` parses what was typed, `commands` lists the commands."""
