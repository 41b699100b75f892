"""Facts of a started engine, as stored in run.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nwor_bench.records.json_part import JsonPart


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(JsonPart):
    """Full CUDA graphs of the target's windows, one set for each NWOR mode."""

    mode: str | None = None
    """vLLM's cudagraph_mode."""

    stock_window_sizes: tuple[int, ...] | None = None
    """Tokens of the windows that vLLM captured."""

    stage_window_sizes: tuple[int, ...] | None = None
    """Tokens of the windows that were captured for mode stage."""

    stage_memory_bytes: int | None = None
    """Memory that the capture for mode stage took."""

    stage_unavailable: str | None = None
    """Why mode stage has no graphs; None if it has, or was not captured yet."""
    control_memory_bytes: int | None = None
    """Device memory of the graphs of mode control."""
    control_unavailable: str | None = None
    """Why there are no graphs of mode control; None if there are, or nobody asked."""
    sham_window_sizes: tuple[int, ...] | None = None
    """Tokens of the windows that were captured once more as stock runs them, for the A/A arm."""
    sham_memory_bytes: int | None = None
    """Device memory of that set."""
    sham_capture_s: float | None = None
    """Seconds that its capture took."""
    sham_unavailable: str | None = None
    """Why the A/A arm has no graphs of its own; None if it has, or nobody asked."""


@dataclass(frozen=True, kw_only=True)
class RecurrentFacts(JsonPart):
    """The states of the target's recurrent layers, on one rank."""

    layers: int | None = None
    """Number of them."""

    state_bytes: int | None = None
    """Bytes of a request's recurrent states over all of them."""

    conv_bytes: int | None = None
    """Bytes of a request's last inputs of their convolutions."""


@dataclass(frozen=True, kw_only=True)
class RankStatus(JsonPart):
    """What a tensor-parallel rank has for itself."""

    device: str | None = None
    """Its device."""

    target_layers: int | None = None
    """Attention layers of its part of the target."""

    drafter_layers: int | None = None
    """Attention layers of its part of the drafter."""

    kv_heads: int | None = None
    """K/V heads a layer."""

    bytes_per_token: int | None = None
    """Bytes that one token's K and V take over all its target layers."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus(JsonPart):
    """Facts of vLLM and the plugin; with tensor parallelism the first rank's, and `ranks`."""

    attached: bool | None = None
    """Whether the runner's methods are wrapped."""

    runner: str | None = None
    """vLLM's model runner: V1 or V2."""

    device: str | None = None
    """Such as cpu or cuda:0."""

    target_layers: int | None = None
    """Attention layers of the target; recurrent ones are none."""

    kv_heads: int | None = None
    """K/V heads a layer."""

    drafter_layers: int | None = None
    """Attention layers of the drafter, which are never staged."""

    staging_buffers: int | None = None
    """Layers that can stage: the target's, or 0."""

    staging_capacity: int | None = None
    """Tokens that a window may stage."""

    staging_unavailable: str | None = None
    """Why nothing can be staged; None if it can."""

    stage_by: str | None = None
    """How staged K/V is held on a GPU; see `StageBy`."""

    bytes_per_token: int | None = None
    """Bytes that one token's K and V take over all target layers; None where nothing stages."""

    rejection_sample_method: str | None = None
    """vLLM's; with "synthetic" acceptance does not follow the target."""

    block_size: int | None = None
    """Tokens of a cache block."""

    num_gpu_blocks: int | None = None
    """Cache blocks, on a CPU too."""

    dtype: str | None = None
    """Data type of weights and activations."""

    kv_cache_dtype: str | None = None
    """Data type of the cache; auto is that of the activations."""

    attention_backend: str | None = None
    """Class of the first target layer's attention; None if no layer has one."""

    dummy_weights: Mapping[str, Any] | None = None
    """Values of the random weights; None if weights were loaded."""

    cuda_graphs: CudaGraphs | None = None
    """Full CUDA graphs; None on a CPU."""

    launch_refusals: Mapping[str, int] | None = None
    """Kernels that Triton launched in the driver's place, by reason."""

    has_probe: bool | None = None
    """Whether a window's phases can be timed on the device."""

    totals: Mapping[str, int] | None = None
    """Counts of all windows since the engine's start."""

    vllm: str | None = None
    """Version of vLLM."""

    start_count: int | None = None
    """Engines that this process has started."""

    start_seconds: float | None = None
    """Time that the start took."""

    ranks: tuple[RankStatus, ...] | None = None
    """Each tensor-parallel rank's own facts; None for a single one."""

    recurrent: RecurrentFacts | None = None
    """States of the target's recurrent layers; None if it has none."""
