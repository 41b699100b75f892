"""Latent attention (MLA) of a window over committed and staged rows."""
