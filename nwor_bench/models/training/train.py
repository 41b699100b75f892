"""Train a head: data, epochs, held-out acceptance, checkpoints, and the model folder."""

import hashlib
import math
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import AdamW

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.models.pairs.local import write_json
from nwor_bench.models.training.acceptance import measure_acceptance
from nwor_bench.models.training.card import write_card
from nwor_bench.models.training.data import (
    Prompts,
    TrainingData,
    choose_prompts,
    load_data,
    make_data,
    more_prompts,
    save_data,
)
from nwor_bench.models.training.eagle_head import EagleHead, write_head
from nwor_bench.models.training.folder import (
    HEAD,
    SEQUENCES_FILE,
    TRAINING_FILE,
    Position,
    load_checkpoint,
    save_checkpoint,
)
from nwor_bench.models.training.progress import TrainingProgress
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.models.training.target import Target, require_llama
from nwor_bench.models.training.training_step import Batches, draft_losses
from nwor_bench.workload.prompts import load_tokenizer

SAVE_EVERY_S = 30.0
"""Checkpoint interval within an epoch; every epoch also ends with a checkpoint."""

WARMUP_SHARE = 0.05
"""Share of the steps in which the learning rate rises; then it falls along a cosine."""

LOSSES = ("loss", "cross_entropy", "smooth_l1")

AfterStep = Callable[[int], None]

PATIENCE = 1_000_000
"""With more tokens than this, training on a CPU takes hours: --device cpu must be given."""


def train_head(
    recipe: Recipe,
    folder: Path,
    device: str,
    console: Console,
    after_step: AfterStep | None = None,
) -> dict[str, Any]:
    """Train into `folder`, from its checkpoint if there is one; returns training.json's content.

    `folder`/head is the finished model folder. On a CPU the result is the same bit for bit,
    however often the training was resumed. `after_step` is called with each step's number. Raises
    ConfigError for a target that cannot be trained for, before anything is generated.
    """
    check_device(device)
    pair = resolve_pair(recipe.pair)
    config = require_llama(pair.target)
    tokenizer = load_tokenizer(pair.target)
    prompts = choose_prompts(recipe, tokenizer)
    dtype = str(config["dtype"]) if pair.dtype == "auto" else pair.dtype
    with TrainingProgress(console) as progress:
        progress.say(f"target: {pair.target} on {device}")
        target = Target(pair.target, device, dtype)
        data = _data(recipe, folder, target, tokenizer, prompts, progress)
        trainer = _Trainer(recipe, folder, target, data, config, progress)
        trainer.run(after_step or (lambda step: None))
        record = trainer.record(pair.name, dtype)
        weights = write_head(folder / HEAD, trainer.head, config, dtype)
        record["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        write_json(folder / HEAD / TRAINING_FILE, record)
        write_card(folder / HEAD / "README.md", record)
    return record


def choose_device(recipe: Recipe) -> str:
    """Return cuda if there is a GPU, else cpu. Raises ConfigError for too much text for a CPU."""
    if torch.cuda.is_available():
        return "cuda"
    if recipe.tokens > PATIENCE:
        raise ConfigError.at(
            "--device",
            f"there is no CUDA device, and {recipe.tokens:,} tokens of text take a CPU "
            "days; write --device cpu if you mean it, or fewer --tokens",
        )
    return "cpu"


def check_device(device: str) -> None:
    """Raise ConfigError for an unknown or missing device."""
    if device not in ("cpu", "cuda"):
        raise ConfigError.unknown("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError.for_field("--device", device, "there is no CUDA device; write cpu")


def _data(
    recipe: Recipe,
    folder: Path,
    target: Target,
    tokenizer: Any,
    prompts: Prompts,
    progress: TrainingProgress,
) -> TrainingData:
    path = folder / SEQUENCES_FILE
    if not path.is_file():
        written = None
        if recipe.self_written:
            progress.begin("prompts", total=recipe.self_written)
            written = more_prompts(recipe, target, tokenizer, prompts, progress.advance)
            kept = f"{len(written.prompts)} prompts of {written.tries} that the target wrote"
            progress.say(f"{kept}, in {written.seconds:.0f} s; dropped: {written.dropped}")
        progress.begin("answers", total=recipe.sequences + len(prompts.held_out))
        data = make_data(recipe, target, prompts, written, progress.advance)
        save_data(path, data)
        progress.say(f"{len(data.training)} answers generated in {data.generating_s:.0f} s")
    return load_data(path)


class _Trainer:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        target: Target,
        data: TrainingData,
        config: dict[str, Any],
        progress: TrainingProgress,
    ):
        self._recipe, self._folder, self._target = recipe, folder, target
        self._data, self._progress = data, progress
        self._batches = Batches(recipe, data.training, target.device)
        torch.manual_seed(recipe.seed)
        self.head = EagleHead(config).to(target.device)
        self._optimizer = AdamW(
            self.head.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._at = Position()
        if (folder / "checkpoint.pt").is_file():
            self._at = load_checkpoint(folder, self.head, self._optimizer, target.device)
            progress.say(f"resuming after step {self._at.step} of {recipe.steps}")

    def run(self, after_step: AfterStep) -> None:
        """Run all remaining steps."""
        recipe, at = self._recipe, self._at
        if not at.epochs:
            self._finish_epoch()
        self._progress.begin("steps", total=recipe.steps, done=at.step)
        saved = time.perf_counter()
        while at.step < recipe.steps:
            began = time.perf_counter()
            losses = self._step()
            at.seconds += time.perf_counter() - began
            at.step += 1
            at.losses = {name: at.losses.get(name, 0.0) + losses[name] for name in LOSSES}
            self._progress.advance(what=f"steps, loss {losses['loss']:.3f}")
            if at.step % recipe.steps_per_epoch == 0:
                self._finish_epoch()
            elif time.perf_counter() - saved > SAVE_EVERY_S:
                save_checkpoint(self._folder, self.head, self._optimizer, at)
                saved = time.perf_counter()
            after_step(at.step)

    def _step(self) -> dict[str, float]:
        batch = self._batches.batch(self._at.step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._recipe, self._at.step)
        with self._autocast():
            losses = draft_losses(self._recipe, self.head, self._target, batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(losses["loss"])
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        return {name: float(value.detach()) for name, value in losses.items()}

    def _finish_epoch(self) -> None:
        recipe, at = self._recipe, self._at
        steps = recipe.steps_per_epoch
        means = {name: at.losses[name] / steps if at.losses else None for name in LOSSES}
        at.epochs.append({"epoch": len(at.epochs), **means, "held_out": self._held_out()})
        at.losses = {}
        self._progress.epoch(at.epochs[-1], recipe.epochs)
        save_checkpoint(self._folder, self.head, self._optimizer, at)

    def _held_out(self) -> list[dict[str, Any]]:
        """Held-out acceptance for each of the recipe's answer lengths."""
        lengths, drafts = self._recipe.held_out_tokens, self._recipe.draft_tokens
        with self._autocast():
            found = measure_acceptance(
                self.head, self._target, self._data.held_out, drafts, lengths
            )
        return [
            {"answer_tokens": length, **acceptance.to_dict()}
            for length, acceptance in zip(lengths, found, strict=True)
        ]

    def _autocast(self) -> torch.autocast:
        """The head's weights stay float32 in training; a GPU computes in bfloat16."""
        on_gpu = self._target.device == "cuda" and self._target.dtype != torch.float32
        return torch.autocast(self._target.device, dtype=torch.bfloat16, enabled=on_gpu)

    def record(self, target: str, dtype: str) -> dict[str, Any]:
        """Record of the training, for training.json and the model card."""
        recipe, data = self._recipe, self._data
        return {
            "recipe": recipe.to_dict(),
            "target": target,
            "dtype": dtype,
            "parameters": sum(weight.numel() for weight in self.head.parameters()),
            "data": {
                "training_sequences": len(data.training),
                "prompts_from_templates": recipe.from_templates,
                "prompts_self_written": recipe.self_written,
                "self_written": data.self_written,
                "sampled_sequences": recipe.sampled_sequences,
                "training_tokens": sum(len(answer) for _, answer in data.training),
                "held_out_sequences": len(data.held_out),
                "generating_s": data.generating_s,
            },
            "steps": self._at.step,
            "training_s": round(self._at.seconds, 3),
            "machine": _machine(self._target.device),
            "software": {name: version(name) for name in ("torch", "transformers")},
            "epochs": self._at.epochs,
        }


def learning_rate(recipe: Recipe, step: int) -> float:
    """A step's learning rate: a linear rise, then a cosine down to a twentieth of the highest."""
    rise = max(1, round(recipe.steps * WARMUP_SHARE))
    if step < rise:
        return recipe.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, recipe.steps - rise)
    return recipe.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def _machine(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"a CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
