"""A stand-in for a ring of vLLM's own in gated delta nets: a third state, one more field of the
metadata, one more argument of the kernel. It computes what stock computes.

vLLM loads it as a plugin (`as_plugin`), in every process of an engine. An entry of
additional_config selects it, as vLLM's own choices of a kernel are selected.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ENTRY = "gdn_decode_backend"
"""Entry of additional_config; its value says which parts the stand-in has: "state"."""


def as_plugin(folder: Path) -> None:
    """Make this module a plugin of vLLM in processes that have the folder in their path."""
    info = folder / "stand_in_ring-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-ring\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstand_in_ring = stand_in_ring:register\n"
    )


def register() -> None:
    """Give gated delta nets a third state in an engine whose additional_config asks for it."""
    import torch
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention as Net,
    )

    original = Net.get_kv_cache_spec
    if original.__name__ == "with_ring":
        return

    def with_ring(layer: Any, vllm_config: Any) -> Any:
        spec = original(layer, vllm_config)
        if ENTRY not in vllm_config.additional_config:
            return spec
        print("stand-in: a gated delta net with a ring", flush=True)
        shapes, dtypes = (*spec.shapes, (4,)), (*spec.dtypes, torch.float32)
        return replace(spec, shapes=shapes, dtypes=dtypes)

    Net.get_kv_cache_spec = with_ring


class RingOperators:
    """vLLM's CPU operators; the one of windows is given a ring too, and computes without it."""

    def __init__(self, operators: Any, name: str):
        self._operators, self._name = operators, name
        self.given = 0

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        return partial(self._called, operator) if name == self._name else operator

    def _called(self, operator: Any, **named: Any) -> Any:
        self.given += 1
        return operator(**named, ring=None)


def without_ring(operator: Any) -> Any:
    """Stock's operator, which may be given a ring."""

    def update(ring: Any = None, **named: Any) -> Any:
        return operator(**named)

    return update


def with_cursors(build: Any) -> Any:
    """A builder's `build`, whose metadata have cursors of a ring."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    @dataclass
    class WithCursors(GDNAttentionMetadata):
        ring_cursors: Any = None

    def build_with_cursors(*given: Any, **named: Any) -> Any:
        return WithCursors(**vars(build(*given, **named)), ring_cursors=())

    return build_with_cursors
