"""The command line: parsing, one module a command, and `doctor`."""
