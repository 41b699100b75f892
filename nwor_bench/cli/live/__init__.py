"""`nwor-bench live`: read a server's /metrics until the ratio is known well enough."""
