"""The command line: `main` reads what was typed, `commands` lists what can be."""
