"""The command line: one module a subcommand, nothing heavy imported before it is needed."""
