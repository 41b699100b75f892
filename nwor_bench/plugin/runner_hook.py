"""`RunnerHook`: what the worker extension and the observers use of either runner's hook."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nwor_bench.plugin.counts.accumulator import Accumulator
from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.observe.device_times import DeviceClock
from nwor_bench.plugin.staging.layers import LayerCache
from nwor_bench.plugin.staging.window import Window
from nwor_bench.records.types import NworMode, ScvMode

if TYPE_CHECKING:
    from nwor_bench.plugin.interleaving import Interleaving


class StagedLayers(Protocol):
    """Where the K/V of a window is staged, in facts."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The target layers in the runner's order."""

    @property
    def num_layers(self) -> int:
        """Number of target layers."""

    @property
    def capacity(self) -> int:
        """Most draft tokens that a window can have."""

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token over all target layers."""


class ScvValidator(Protocol):
    """Decides which drafts were accepted, in one SCV mode at a time."""

    mode: ScvMode
    """The mode in use."""

    counters: Counter[str]
    """Named counts of what validations did since the mode was set."""

    fallbacks: Counter[str]
    """Validations not done as the mode says since it was set, by reason."""


class RunnerHook(Protocol):
    """One worker's hook: it follows vLLM's V1 or V2 runner and owns its windows.

    Calls come between batches. `agree` comes first and once, then `attach`; `detach` may follow at
    any time, and `attach` again.
    """

    @property
    def name(self) -> str:
        """Which runner it follows: "V1" or "V2"."""

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""

    @property
    def attached(self) -> bool:
        """True while the runner's methods are wrapped."""

    @property
    def nwor_mode(self) -> NworMode:
        """The NWOR mode in use."""

    @property
    def target_layers(self) -> list[str]:
        """Names of the target's layers that have a KV cache, in the runner's order."""

    @property
    def drafter_layers(self) -> list[str]:
        """Names of the drafter's layers that have a KV cache; they are never staged."""

    @property
    def stage_by(self) -> str:
        """How drafts are held: "reference" or "copy"."""

    @property
    def staging_unavailable(self) -> str | None:
        """The fallback reason of every window in mode stage; None where windows are staged."""

    @property
    def window(self) -> Window | None:
        """The window in flight, one object for good; None where nothing can be staged."""

    @property
    def buffers(self) -> StagedLayers | None:
        """Where windows are staged; None where nothing can be staged."""

    @property
    def graph_sets(self) -> Sequence[Any]:
        """The sets of CUDA graphs of our own, one for each mode that has one; each has `replay`."""

    @property
    def validator(self) -> ScvValidator:
        """Decides which drafts were accepted."""

    @property
    def accumulator(self) -> Accumulator:
        """Holds finished windows until they are drained."""

    @property
    def late(self) -> LateCounts | None:
        """Steps whose counts are still on the device; None where the host counts at once."""

    @property
    def clock(self) -> DeviceClock:
        """Marks the steps on the device, where it is on."""

    @property
    def has_probe(self) -> bool:
        """True if `set_probe` can time phases on the device."""

    def agree(self) -> None:
        """Stage on every tensor-parallel rank or on none; every rank must call it."""

    def attach(self) -> None:
        """Wrap the runner's methods; nothing stays wrapped after an error."""

    def detach(self) -> None:
        """Restore the runner and its layers as they were found."""

    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes; the validator's counters start at zero."""

    def interleave(self, turns: "Interleaving | None") -> None:
        """Let cells take turns within the batches to come; None: no longer."""

    def take_turn(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows; both were set before."""

    def prepare_sham(self) -> str | None:
        """Make what a sham replays, once, after every mode was set; the reason if it cannot run."""

    def take_sham_turn(self) -> None:
        """Switch as for a turn of stage; the windows compute what mode off computes."""

    def drain(self, output_lengths: dict[str, int] | None) -> list[dict[str, Any]]:
        """Windows since the last drain, as dicts of `WindowCounts` and `WindowTimes`.

        Args:
            output_lengths: tokens that each finished request returned, by its name; windows that
                ran past them are counted apart. None: every window counts.
        """

    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check windows of the next batch layer by layer; what was measured since the last call.

        Args:
            requests: most requests of the batch; None: check no longer.
        """

    def device_errors(self) -> list[str]:
        """What commits refused on the device since the last call; waits for the device."""

    def set_probe(self, on: bool) -> None:
        """Time each window's phases on the device, or stop."""

    def graph_facts(self) -> dict[str, Any] | None:
        """Sizes of vLLM's CUDA graphs and of those that stage; None for a runner without both."""

    def launch_refusals(self) -> dict[str, int] | None:
        """Kernels that are launched through Triton, not by the driver, by reason; None: none."""
