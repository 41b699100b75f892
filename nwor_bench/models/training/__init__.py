"""Training of drafters: an EAGLE head from text that the target itself generates.

A recipe says what is trained, on how much, for how long; everything random follows from its
seed. Only `train`, `data` and `target` need more than torch.
"""
