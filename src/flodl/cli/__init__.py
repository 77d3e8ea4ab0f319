"""The command line, `fdl`. Importing it loads neither torch nor numpy; a subcommand is imported when it is called."""
