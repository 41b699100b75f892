"""Cells compared window by window within a batch: groups, robust estimates, effects, the split."""
