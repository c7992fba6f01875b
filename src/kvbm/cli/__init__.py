"""The `kvbm` command: `main` has the list of subcommands, and each subcommand is a module of its own here."""
