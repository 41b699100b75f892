"""A comparison of two runs on the terminal, as Markdown and as JSON."""
