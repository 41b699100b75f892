"""An EAGLE head: a layer that fuses token and hidden state, then one decoder layer.

Weights have the names and shapes that vLLM's EagleLlamaForCausalLM loads. Embedding and output
layer are the target's. The first layer has no input norm, as in EAGLE (Li et al., 2024,
arXiv:2401.15077). Training drafts several tokens as inference does: each further draft continues
from the head's own output (the training-time test of EAGLE-3, arXiv:2503.01840).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nwor_bench.models.pairs.local import write_json


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of one draft step at all positions: [batch, heads, tokens, head_dim]."""

    keys: Tensor
    values: Tensor


class EagleHead(nn.Module):
    """Drafts the target's next hidden state.

    Args:
        config: config.json of the target, a Llama model.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden = int(config["hidden_size"])
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])

    def forward(self, embeds: Tensor, hidden: Tensor, earlier: list[KeysValues]) -> Tensor:
        """One draft step at all positions.

        Args:
            embeds: embeddings of the token after each position, [batch, tokens, hidden].
            hidden: hidden state at each position: the target's in the first step, then the head's
                own of the previous step, shifted by one position.
            earlier: keys and values of the previous steps; this step's are appended.

        Returns:
            The predicted hidden state after each position, same shape.
        """
        fused = self.fc(torch.cat([embeds, hidden.to(embeds.dtype)], dim=-1))
        drafted: Tensor = self.layers[0](fused, earlier)
        return drafted


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = _Mlp(hidden, int(config["intermediate_size"]))

    def forward(self, hidden: Tensor, earlier: list[KeysValues]) -> Tensor:
        hidden = hidden + self.self_attn(hidden, earlier)
        norm = self.post_attention_layernorm
        mixed: Tensor = hidden + self.mlp(norm(hidden.to(norm.weight.dtype)))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, hidden: int, wide: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, self.heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.head_dim = int(config.get("head_dim") or hidden // self.heads)
        self.theta = float(config.get("rope_theta") or 10000.0)
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, rows, bias=False)
        self.k_proj = nn.Linear(hidden, kv_rows, bias=False)
        self.v_proj = nn.Linear(hidden, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, hidden, bias=False)

    def forward(self, hidden: Tensor, earlier: list[KeysValues]) -> Tensor:
        batch, tokens, _ = hidden.shape
        queries = _rotate(self._split(self.q_proj(hidden)), self.theta)
        keys = _rotate(self._split(self.k_proj(hidden)), self.theta)
        values = self._split(self.v_proj(hidden))
        copies = self.heads // self.kv_heads
        earlier.append(
            KeysValues(keys.repeat_interleave(copies, 1), values.repeat_interleave(copies, 1))
        )
        mixed = _attend(queries, earlier).transpose(1, 2).reshape(batch, tokens, -1)
        out: Tensor = self.o_proj(mixed)
        return out

    def _split(self, rows: Tensor) -> Tensor:
        """[batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]."""
        return rows.view(*rows.shape[:2], -1, self.head_dim).transpose(1, 2)


def _attend(queries: Tensor, steps: list[KeysValues]) -> Tensor:
    """Attention of the last step, j, at every position p.

    Position p belongs to the window that began at p - j. Up to p - j it attends to the first step's
    keys (from the target's hidden states); after that to one key per step m, at p - (j - m).
    """
    first, last = steps[0], len(steps) - 1
    tokens = queries.shape[2]
    queries = queries * queries.shape[-1] ** -0.5
    at = torch.arange(tokens, device=queries.device)
    seen = at[None, :] <= at[:, None] - last
    scores = [(queries @ first.keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)]
    values = []
    for step in range(1, last + 1):
        back = last - step
        score = (queries * _later(steps[step].keys, back)).sum(-1, keepdim=True)
        scores.append(score.masked_fill((at < back)[:, None], -torch.inf))
        values.append(_later(steps[step].values, back))
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(queries.dtype)
    out = weights[..., :tokens] @ first.values
    for index, value in enumerate(values):
        out = out + weights[..., tokens + index, None] * value
    return out


def _later(rows: Tensor, positions: int) -> Tensor:
    """Shift rows along dim -2: row p becomes row p - positions, zeros at the beginning."""
    return F.pad(rows[..., : rows.shape[-2] - positions, :], (0, 0, positions, 0))


def _rotate(rows: Tensor, theta: float) -> Tensor:
    """Rotary embedding for positions 0, 1, ... over the halves of each head (Su et al., 2021)."""
    half = rows.shape[-1] // 2
    powers = torch.arange(half, device=rows.device, dtype=torch.float32) / half
    at = torch.arange(rows.shape[-2], device=rows.device, dtype=torch.float32)
    angles = at[:, None] * theta**-powers
    cos, sin = angles.cos(), angles.sin()
    first, second = rows[..., :half].float(), rows[..., half:].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(rows.dtype)


def unroll(head: EagleHead, embeds: Tensor, hidden: Tensor, draft_tokens: int) -> list[Tensor]:
    """`draft_tokens` consecutive drafts from every position.

    Args:
        head: the head.
        embeds: embeddings of a sequence's tokens, [batch, tokens, hidden].
        hidden: the target's hidden states at these tokens, same shape.
        draft_tokens: drafts per window.

    Returns:
        For each step j: [batch, tokens - 1, hidden]. Row p is the predicted hidden state at p + 1,
        in the window that began at p - j; its logits are those of token p + 2. Rows p < j belong
        to no window.
    """
    following, known = embeds[:, 1:], hidden[:, :-1]
    earlier: list[KeysValues] = []
    drafted = []
    for _ in range(draft_tokens):
        ahead = head(following, known, earlier)
        drafted.append(ahead)
        known = _later(ahead, 1)
    return drafted


def head_config(target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a head for the target with config.json `target`."""
    kept = {name: value for name, value in target.items() if name != "architectures"}
    head = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1, "dtype": dtype}
    return {**kept, **head}


def write_head(folder: Path, head: EagleHead, target: dict[str, Any], dtype: str) -> Path:
    """Write the head as a model folder for vLLM; returns the file of its weights, in `dtype`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, tensor in head.state_dict().items()
    }
    write_json(folder / "config.json", head_config(target, dtype))
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    return partial.replace(folder / "model.safetensors")
