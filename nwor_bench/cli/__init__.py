"""The command line: the app, one module per command, and `doctor`."""
