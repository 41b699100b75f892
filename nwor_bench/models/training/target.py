"""The target model in training: hidden states, logits and generated text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs import read_model_config

GENERATED_TOGETHER = {"cpu": 32, "cuda": 4096}
"""Texts generated in one batch, enough to keep the device busy.

A decoding step costs about 30 ms of launches for any batch size. With 4,096 texts of 256 tokens
SmolLM2-135M's K/V takes 24 GB (30 layers x 2 x 3 heads x 64 x 2 bytes = 23 kB per token), its
float32 logits 0.8 GB. 4,096 x 9 heads is below the 65,535 blocks that some attention kernels allow.
"""


def require_llama(folder: str) -> dict[str, Any]:
    """config.json of a target for which a head can be trained.

    Raises ConfigError for hub models, and for models that the head's layer cannot match:
    architectures other than Llama, scaled rotary positions, biases.
    """
    config = read_model_config(folder, "target")
    if config is None or not any(Path(folder).glob("*.safetensors")):
        raise ConfigError.for_field("target", folder, "name a folder with the model's weights")
    faults = {
        "architectures": config.get("architectures") != ["LlamaForCausalLM"],
        "rope_scaling": bool(config.get("rope_scaling")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    for name, is_fault in faults.items():
        if is_fault:
            raise ConfigError.for_field(
                f"target: {name}", config.get(name),
                "heads are trained for plain Llama models (no scaled positions, no biases)",
            )  # fmt: skip
    return config


class Target:
    """A frozen causal language model on one device.

    Args:
        folder: its model folder.
        device: "cpu" or "cuda".
        dtype: dtype on a GPU; a CPU always uses float32, which is faster there.
    """

    def __init__(self, folder: str, device: str, dtype: str):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        self._model.to(device).eval().requires_grad_(False)
        # Answers continue past the end-of-text token, as in runs: all have the same length.
        self._model.generation_config.eos_token_id = None

    @torch.no_grad()
    def hidden_states(self, ids: Tensor) -> Tensor:
        """Final hidden states after the norm: [batch, tokens] -> [batch, tokens, hidden]."""
        return self._model.model(input_ids=ids, use_cache=False).last_hidden_state

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings, shared with the head: [batch, tokens] -> [batch, tokens, hidden]."""
        return self._model.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32: [..., hidden] -> [..., vocabulary]; gradients reach `hidden`."""
        return self._model.lm_head(hidden.to(self.dtype)).float()

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> list[list[int]]:
        """Answers of exactly `new_tokens` tokens: greedy at temperature 0, else sampled."""
        return self._generate(prompts, new_tokens, temperature, end=None)

    def write(
        self, begin: Sequence[int], count: int, end: int, longest: int, temperature: float
    ) -> list[list[int] | None]:
        """`count` sampled continuations of `begin`, each up to the token `end`.

        None for a text without `end` within `longest` tokens.
        """
        rows = self._generate([begin] * count, longest, temperature, end)
        return [row[: row.index(end)] if end in row else None for row in rows]

    @torch.no_grad()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        temperature: float,
        end: int | None,
    ) -> list[list[int]]:
        """At most `new_tokens` tokens per prompt; rows that ended early are padded with 0."""
        from transformers import StaticCache

        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        how: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        # A static cache: a growing one allocates memory at every token.
        cache = StaticCache(config=self._model.config, max_cache_len=width + new_tokens)
        found = self._model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=end,
            past_key_values=cache,
            disable_compile=True,
            **how,
        )
        rows: list[list[int]] = found[:, width:].tolist()
        return rows
