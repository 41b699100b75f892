"""Facts of a started engine, and of machine and software, as stored in run.json.

Values that could not be read are None or empty, not 0.
"""

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class JsonPart(BaseModel):
    """An object in run.json; any field may be None.

    `model_fields_set` names the fields that were given. The others were not recorded: their None
    says nothing, and they are not written. Keys of other versions are kept as read.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The part of a JSON object. Raises pydantic's ValidationError for another type."""
        return cls.model_validate_json(json.dumps(values))

    def __bool__(self) -> bool:
        """True if anything was recorded."""
        return bool(self.model_fields_set)


def to_json(part: JsonPart | None) -> dict[str, Any]:
    """The JSON object of a part; {} for None."""
    return {} if part is None else part.model_dump(mode="json", exclude_unset=True, by_alias=True)


class CudaGraphs(JsonPart):
    """Full CUDA graphs of the target's windows, one set for each NWOR mode."""

    mode: str | None = None
    """vLLM's cudagraph_mode."""
    largest_window: int | None = None
    """Tokens of the largest window that has a graph in vLLM; None without such graphs."""
    stock_window_sizes: tuple[int, ...] | None = None
    """Tokens of the windows that vLLM captured."""
    stage_window_sizes: tuple[int, ...] | None = None
    """Tokens of the windows that were captured for mode stage."""
    attention: Mapping[str, str] | None = None
    """What attends staged windows by size, requests x rows, and at which contexts stock does."""
    attention_us: Mapping[str, Any] | None = None
    """By size and layers of one shape: times of a layer by contender, at each context."""
    attention_untimed: str | None = None
    """Why a table chose what attends, although it was to be timed; None if it was timed."""
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


class RankStatus(JsonPart):
    """What a tensor-parallel rank has for itself."""

    device: str | None = None
    """The rank's device."""
    target_layers: int | None = None
    """Attention layers of its part of the target."""
    drafter_layers: int | None = None
    """Attention layers of its part of the drafter."""
    kv_heads: int | None = None
    """K/V heads a layer."""
    bytes_per_token: int | None = None
    """Bytes that one token's K and V take over all its target layers."""


class EngineStatus(JsonPart):
    """Facts of vLLM and the plugin; with tensor parallelism the first rank's, and `ranks`."""

    attached: bool | None = None
    """True if the runner's methods are wrapped."""
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
    """Bytes that one token's K and V take over all target layers; None if nothing stages."""
    experts: int | None = None
    """Routed experts of the target; 0 for a dense one."""
    state_slots: int | None = None
    """Slots of states that a request reserves in a recurrent layer; None without such layers."""
    state_reserved_bytes: int | None = None
    """Bytes of one request's slots in all these layers, padding included."""
    state_layers: int | None = None
    """Recurrent layers whose states are staged beside the K/V; 0 if stock keeps them."""
    states_unavailable: str | None = None
    """Why stock keeps the recurrent states; None if they are staged, or there are none."""
    state_bytes: int | None = None
    """Bytes of one request's states in these layers; None if none is staged."""
    state_record_bytes: int | None = None
    """Bytes of the buffers in which a window's tokens are kept for the states' commit."""
    state_record_token_bytes: int | None = None
    """Bytes of one token in them, over all these layers."""
    rejection_sample_method: str | None = None
    """vLLM's; with "synthetic" acceptance does not follow the target."""
    drafter_max_model_len: int | None = None
    """Longest context of the drafter, in tokens; None without speculation."""
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
    """Launches of vLLM's that our commit could not replace, by reason."""
    vllm: str | None = None
    """Version of vLLM."""
    start_count: int | None = None
    """Engines that this process has started."""
    start_seconds: float | None = None
    """Time that the start took."""
    arms: Mapping[str, Mapping[str, Any]] | None = None
    """Engines of other arms, and the facts in which they differ from these; None for one engine."""
    ranks: tuple[RankStatus, ...] | None = None
    """Each tensor-parallel rank's own facts; None for a single one."""

    @property
    def bytes_per_state(self) -> int | None:
        """Bytes of one request's state in one layer; None if none is staged."""
        if not self.state_bytes or not self.state_layers:
            return None
        return self.state_bytes // self.state_layers

    @property
    def staged_parts(self) -> str | None:
        """What mode stage keeps out of the cache; None if it is nothing, or not known."""
        if self.staging_unavailable is not None or self.state_layers is None:
            return None
        if self.states_unavailable is not None:
            return f"K/V (states by stock: {self.states_unavailable})"
        return "K/V and states" if self.state_layers else "K/V"


class CpuFacts(JsonPart):
    """The processor."""

    model: str | None = None
    """Model name in /proc/cpuinfo."""
    cores: int | None = None
    """Physical cores."""
    threads: int | None = None
    """Hardware threads."""
    usable_threads: int | None = None
    """Hardware threads that this process may use (Linux)."""


class MemoryFacts(JsonPart):
    """The host's memory, in bytes."""

    total_bytes: int | None = None
    """Memory in the machine."""


class GpuFacts(JsonPart):
    """One GPU by NVML, when the run began."""

    name: str | None = None
    """Product name."""
    driver: str | None = None
    """Version of the driver."""
    compute_capability: str | None = None
    """Such as 9.0."""
    memory_total_bytes: int | None = None
    """Memory of the GPU."""
    power_limit_w: float | None = None
    """Enforced power limit."""
    ecc: bool | None = None
    """True if memory errors are corrected."""


class GitState(JsonPart):
    """Revision of the checkout that nwor-bench ran from; None for an installed copy."""

    revision: str | None = None
    """Commit."""
    dirty: bool | None = None
    """True if there were uncommitted changes."""


class Environment(JsonPart):
    """Machine, GPUs, libraries, revision and settings; never who ran it, or on which host."""

    command_line: tuple[str, ...] | None = None
    """Arguments of the process."""
    python: str | None = None
    """Version of Python."""
    os: str | None = None
    """Name and version of the operating system."""
    cpu: CpuFacts | None = None
    """The processor."""
    memory: MemoryFacts | None = None
    """The host's memory."""
    gpus: tuple[GpuFacts, ...] | None = None
    """The GPUs that the process saw."""
    gpu_note: str | None = None
    """Why there are no GPUs, if there are none."""
    packages: Mapping[str, str | None] | None = None
    """Version by distribution; None for one that is not installed."""
    git: GitState | None = None
    """The checkout that nwor-bench ran from."""
    settings: Mapping[str, str | None] | None = None
    """Environment variables that affect a run; None for one that is not set."""
