"""Where a training stands: everything that the next step depends on, in one file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nwor_bench.errors import ConfigError, StoreError

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_VERSION = 1


@dataclass
class Position:
    """How far a training is.

    Attributes:
        step: optimiser steps done.
        losses: sums over the steps of the epoch that is under way, by kind.
        epochs: one row for each finished epoch; row 0 is the untrained head.
        seconds: time in training steps so far.
    """

    step: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def save_checkpoint(folder: Path, head: nn.Module, optimizer: Optimizer, at: Position) -> None:
    """Replace the checkpoint in one step: whoever is killed leaves the last one whole."""
    partial = folder / f"{CHECKPOINT}.partial"
    content = {
        "version": CHECKPOINT_VERSION,
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": vars(at),
    }
    torch.save(content, partial)
    partial.replace(folder / CHECKPOINT)


def load_checkpoint(folder: Path, head: nn.Module, optimizer: Optimizer, device: str) -> Position:
    """Put the head and the optimiser back where they were.

    Raises ConfigError where there is no checkpoint, StoreError for one that is damaged or of
    another version.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ConfigError.for_field("--resume", str(folder), f"it holds no {CHECKPOINT}")
    try:
        stored = torch.load(path, map_location=device, weights_only=True)
        if stored["version"] != CHECKPOINT_VERSION:
            raise StoreError(f"{path}: version {stored['version']!r} is unknown")
        head.load_state_dict(stored["head"])
        optimizer.load_state_dict(stored["optimizer"])
        return Position(**stored["position"])
    except StoreError:
        raise
    except Exception as error:  # torch raises many kinds for a file that is cut off
        raise StoreError(f"{path}: cannot be read ({error}); start the training anew") from error
