"""A sweep's configuration, merged and checked: what runs, how much of it, and until when."""

from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from nwor_bench.records.types import AA, Cell, NworMode, Phase, ScvMode, StageBy, StageL2
from nwor_bench.workload.scenario import Scenario
from nwor_bench.workload.stopping import MAX_BLOCKS, StoppingRule

DEFAULT_PAIR = "smollm2"
DEFAULT_SEED = 0
DEFAULT_MAX_WARMUP = 15


@dataclass(frozen=True)
class RunSpec:
    """All that a sweep needs besides its model pair, merged and validated.

    `scenario` already carries the command line's values. `speculative_config` and
    `engine_args` are vLLM's own, passed through.
    """

    scenario: Scenario
    nwor_modes: tuple[NworMode, ...]
    scv_modes: tuple[ScvMode, ...]
    seed: int = DEFAULT_SEED
    dtype: str | None = None
    block_size: int | None = None
    tensor_parallel_size: int = 1
    speculative_config: dict[str, Any] | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    kv_cache_gib: float | None = None
    ci_width: float | None = None
    max_blocks: int | None = None
    time_budget_s: float | None = None
    max_warmup: int | None = None
    dram_counters: bool = False
    launch_counts: bool = False
    stage_by: StageBy = StageBy.REFERENCE
    stage_l2: StageL2 = StageL2.NORMAL

    def cells(self, pair_name: str) -> tuple[Cell, ...]:
        """Every combination of the modes, in the order given, and last the A/A arm: off x off
        once more. off x off itself is among them."""
        modes = product(self.nwor_modes, self.scv_modes)
        cells = [Cell(pair_name, nwor, scv) for nwor, scv in modes]
        return (*cells, Cell(pair_name, NworMode.OFF, ScvMode.OFF, AA))

    @property
    def stopping(self) -> StoppingRule:
        """How many timed blocks to run."""
        blocks = self.scenario.batches
        if self.ci_width is None and self.time_budget_s is None:
            return StoppingRule(blocks, blocks)
        most = self.max_blocks or max(blocks, MAX_BLOCKS)
        return StoppingRule(blocks, most, self.ci_width, self.time_budget_s)

    @property
    def warmup_batches(self) -> tuple[int, int]:
        """Warm-up batches, at least and at most: in between, until their times are steady."""
        least = self.scenario.warmup
        most = max(least, DEFAULT_MAX_WARMUP) if self.max_warmup is None else self.max_warmup
        return least, most

    @property
    def counted_blocks(self) -> dict[Phase, int]:
        """Blocks that run once more, untimed, for each kind of counters: DRAM bytes need as many
        as times do, launches are the same in every block."""
        return {
            Phase.COUNTERS: self.scenario.batches if self.dram_counters else 0,
            Phase.LAUNCHES: 1 if self.launch_counts else 0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["scenario"] = self.scenario.model_dump(mode="json")
        plain["nwor_modes"] = [mode.value for mode in self.nwor_modes]
        plain["scv_modes"] = [mode.value for mode in self.scv_modes]
        plain["stage_by"] = self.stage_by.value
        plain["stage_l2"] = self.stage_l2.value
        return plain
