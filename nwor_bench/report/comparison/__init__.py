"""A comparison of two runs, as text, Markdown and JSON."""
