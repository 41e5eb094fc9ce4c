"""The command line: ``daskserve`` and its subcommands."""
