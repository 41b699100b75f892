"""One report over all runs of a sweep."""
