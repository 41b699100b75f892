"""Is a differing greedy token an error, or a tie that the run's precision cannot tell apart?

Two correct kernels sum in different orders, so in bf16 they may prefer different tokens where
two logits all but agree. At the first differing token both candidates' logits are computed in
float32, and the allowance is what the run's own precision does to logits at that very place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """The first differing token of one request, in logits of the target.

    Attributes:
        gap: distance of the two candidates' float32 logits.
        allowance: twice the largest logit error of the run's dtype at that position.
    """

    gap: float
    allowance: float

    @property
    def explained(self) -> bool:
        """True if the run's precision cannot tell the two tokens apart."""
        return self.gap <= self.allowance


class LogitGaps:
    """Recomputes logits with the target's own weights, loaded when first asked.

    Args:
        target: folder of a model with weights.
        dtype: the run's dtype, e.g. "bfloat16".
    """

    def __init__(self, target: str, dtype: str):
        self._target = target
        self._dtype = dtype
        self._models: tuple[Any, Any] | None = None

    @staticmethod
    def can_explain(target: str, load_format: str | None) -> bool:
        """Only a local folder with weights can be asked; a shape without weights has none."""
        return load_format is None and any(Path(target).glob("*.safetensors"))

    def explain(
        self, prompt: Sequence[int], reference: Sequence[int], tokens: Sequence[int]
    ) -> Explanation | None:
        """Explain where `tokens` first leaves `reference`; None if one is the other's beginning."""
        shared = min(len(reference), len(tokens))
        at = next((i for i in range(shared) if reference[i] != tokens[i]), None)
        if at is None:
            return None
        exact, rough = self._logits([*prompt, *reference[:at]])
        error = float((rough - exact).abs().max())
        gap = float((exact[reference[at]] - exact[tokens[at]]).abs())
        return Explanation(gap, 2 * error)

    def _logits(self, ids: list[int]) -> tuple[Any, Any]:
        """Next-token logits in float32, computed in float32 and in the run's dtype."""
        import torch

        exact, rough = self._models or self._load()
        on_device = torch.tensor([ids], device=exact.device)
        with torch.no_grad():
            return exact(on_device).logits[0, -1], rough(on_device).logits[0, -1].float()

    def _load(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtypes = (torch.float32, getattr(torch, self._dtype))
        exact, rough = (
            AutoModelForCausalLM.from_pretrained(self._target, dtype=dtype).to(device).eval()
            for dtype in dtypes
        )
        self._models = (exact, rough)
        return self._models
