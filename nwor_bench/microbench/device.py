"""The CUDA side of a run: which builder makes which kernel's contest, and what it ran on."""

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.microbench.attention import attention_contest
from nwor_bench.microbench.cases import Group, Spec
from nwor_bench.microbench.commit import commit_contest
from nwor_bench.microbench.mask import mask_contest
from nwor_bench.microbench.run import Bench
from nwor_bench.microbench.stage import stage_contest
from nwor_bench.microbench.stopwatch import CudaStopwatch
from nwor_bench.microbench.subject import Contest

_BUILDERS = {
    "commit": commit_contest,
    "stage": stage_contest,
    "mask": mask_contest,
    "verify_attention": attention_contest,
}


def make_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    """What times on the current CUDA device, and facts of that device for the report."""
    stopwatch = CudaStopwatch()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "l2_bytes": stopwatch.l2_bytes,
        "copy_gb_per_s": stopwatch.copy_gb_per_s(),
    }
    device = torch.device("cuda", torch.cuda.current_device())

    def build(group: Group) -> Contest:
        torch.manual_seed(spec.seed)
        try:
            return _BUILDERS[group.kernel](group, spec.shape, device, spec.seed)
        except torch.OutOfMemoryError as error:
            raise MemoryError from error

    bench = Bench(spec, build, stopwatch, perf_counter, _throttled_ms(), _release)
    return bench, facts


def _throttled_ms() -> Callable[[], float | None]:
    """Milliseconds since now in which power or heat held the clocks down, by NVML."""
    monitor = ConditionMonitor(gpus=True)
    return lambda: monitor.end().get("gpu_throttled_ms")


def _release() -> None:
    """Graphs hold their buffers until they are collected."""
    gc.collect()
    torch.cuda.empty_cache()
