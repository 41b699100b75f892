"""Reports: one document a result, and one renderer a medium."""
