"""Recurrent layers: their states' sizes, and the bytes that a speculative step moves of them."""
