"""What staging is for both runners: a window's life, the target's layers, the refusals."""
