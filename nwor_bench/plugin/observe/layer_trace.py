"""Copies of each target layer's inputs and output in one window.

Inside the capture of a CUDA graph the copies are part of the graph: each replay refills them.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LayerCall:
    """One layer's inputs and output in the latest forward; None if it had none."""

    key: Tensor | None = None
    """[rows, kv_heads, head_dim], K as the layer would write it."""
    value: Tensor | None = None
    """[rows, kv_heads, value_dim]."""
    query: Tensor | tuple[Tensor, ...] | None = None
    """[rows, heads, head_dim], or the parts of a latent layer's query."""
    output: Tensor | None = None
    """[rows, heads, value_dim], our attention's output."""
    selected: Tensor | None = None
    """[rows, selected] int32, positions that a sparse layer's indexer chose."""


@dataclass
class LayerTrace:
    """Calls of all target layers, by name. A layer records only while staging has a trace."""

    calls: dict[str, LayerCall] = field(default_factory=dict)

    def of(self, name: str) -> LayerCall:
        """The layer's call, made at its first use."""
        return self.calls.setdefault(name, LayerCall())

    def wrote(self, name: str, key: Tensor, value: Tensor) -> None:
        """Copy the K and V that a layer was given to write."""
        call = self.of(name)
        call.key, call.value = key.clone(), value.clone()

    def attended(
        self,
        name: str,
        query: Tensor | tuple[Tensor, ...],
        output: Tensor,
        selected: Tensor | None = None,
    ) -> None:
        """Copy a layer's queries and the output of its attention."""
        call = self.of(name)
        call.query = query.clone() if isinstance(query, Tensor) else tuple(q.clone() for q in query)
        call.output = output.clone()
        call.selected = None if selected is None else selected.clone()
