"""A sweep over a Ray cluster: one engine a GPU."""
