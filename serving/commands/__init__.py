"""The subcommands that this package owns: modules with HELP, add_arguments and run (see `serving/cli.py`)."""
