"""A step of vLLM's runner whose counts are still on the device."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from nwor_bench.plugin.observe.device_times import Marks
from nwor_bench.records.types import WindowTimes
from nwor_bench.workload.window_order import Turn


@dataclass(slots=True)
class PendingStep:
    """A finished step whose counts are still on the device. Host times in seconds."""

    started: float
    """When the step began, on the host's clock."""
    invalid_drafts: Mapping[str, int] | None = None
    """Drafts that a grammar forbids, by request."""
    num_tokens: int = 0
    """Tokens of the step."""
    req_ids: Sequence[str] = ()
    """Requests of the step in batch order."""
    drafts: np.ndarray | None = None
    """[requests] drafts of each; None for a step without drafts, which only counts tokens."""
    num_sampled: Tensor | None = None
    """[requests] int32 on the device, tokens that each request got."""
    staged_tokens: int = 0
    """Drafts that were staged and committed or rejected."""
    committed_tokens: int | None = None
    """Drafts that the commit wrote in every layer, as it counted them; None: not counted."""
    certain: int | None = None
    """Rows of each request that its commit wrote beside accepted drafts; None: no commit ran."""
    decided_in_commit: bool = False
    """The commit was given vLLM's `num_sampled`, not accepted counts."""
    sealed: int = 0
    """Its number among all steps, if it is sealed (`late_counts`); else 0."""
    ends_reading: bool = False
    """No commit has run since the last sealed step, this one included."""
    counters: Tensor | None = None
    """Flags and rows written, [2 x layers] int32, as they stand behind it, if it is sealed."""
    control_tokens: int = 0
    """Drafts of a control window; see `WindowCounts`."""
    fallback_reason: str | None = None
    """Why the window was written directly."""
    scv_path: str | None = None
    """How acceptance was decided; see `WindowCounts`."""
    scv_fallback_reason: str | None = None
    """Why it was not decided as the SCV mode says."""
    scv_s: float | None = None
    """Host time of that decision."""
    hook_s: float = 0.0
    """Host time that the hooks added."""
    period_s: float | None = None
    """Time to the start of the next step. The host runs ahead of the device, so the first windows
    after a prefill include the rest of that prefill: they get no time (SETTLING)."""
    began: Any = None
    """CUDA event of the step's start; None unless the device's clock is on."""
    ended: Any = None
    """CUDA event of the next step's start; the V1 runner's is behind `num_sampled`."""
    turn: Turn | None = None
    """The window's turn in an interleaved batch."""
    marks: Marks = field(default_factory=dict)
    """CUDA events between the window's phases, where the probe is on."""
    times: WindowTimes | None = None
    """Times that the runner measured itself; they override the times above."""
    finished: Collection[str] = ()
    """Requests that ended before this step."""
    restarted: Mapping[str, int] = field(default_factory=dict)
    """Requests that start again with this step, and the tokens that they have."""

    @property
    def is_window_alone(self) -> bool:
        """True for a step without prefill: each request runs its drafts and the token before."""
        if self.drafts is None:
            return False
        return self.num_tokens == int(self.drafts.sum()) + len(self.drafts)
