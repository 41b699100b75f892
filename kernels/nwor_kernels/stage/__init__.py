"""Copies the draft tokens' K/V out of a step's activations."""
