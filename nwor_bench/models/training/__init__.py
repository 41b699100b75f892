"""Training of drafters: an EAGLE head, trained on text that the target generates.

A recipe defines what is trained, on how many tokens and for how many epochs; its seed decides
everything random.
"""
