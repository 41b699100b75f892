"""How long will a sweep take, roughly? Asked by dry runs, before anything is measured.

A window reads the models' weights once and computes on every draft token, so its time is taken
as the longer of the two, at the bandwidth and the speed that this machine shows in a tenth of a
second (NVML's figures on a GPU). Half of the drafts are assumed to be accepted. Attention,
sampling and the drafter's own host time are left out: expect the truth to be longer.
"""

import time
from dataclasses import dataclass

from nwor_bench.errors import BenchError
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs import ResolvedPair, read_model_config
from nwor_bench.records.types import Interleave, ScvMode
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK
from nwor_bench.workload.schedule import CHECK_BLOCKS

ENGINE_START_S = 15.0
"""A later start on a GPU takes 16 s, one on a CPU 4 to 10; a machine's first may take 140."""

PREFILL_WINDOWS = 2
"""The prompts' prefill and what surrounds a batch, in windows."""

_ELEMENT_BYTES = {"float32": 4}
_GPU_HOST_S, _CPU_HOST_S = 0.002, 0.008
"""Host time a window that no model size explains: seen on an H200 and on two CPU cores."""


@dataclass(frozen=True)
class Machine:
    """Bytes a second from memory, and operations a second (None: not what limits it)."""

    bytes_per_s: float
    flops: float | None


def this_machine() -> Machine:
    """The first GPU's memory bandwidth as NVML tells it, else a short trial on the CPU."""
    bandwidth = _gpu_bandwidth()
    return Machine(bandwidth, None) if bandwidth is not None else _try_cpu()


def batch_seconds(pair: ResolvedPair, spec: RunSpec, machine: Machine) -> float | None:
    """About how long one batch takes; None for a model whose size is not known here."""
    sizes = [_parameters(model) for model in (pair.target, pair.draft) if model]
    if None in sizes:
        return None
    target, *draft = [float(size) for size in sizes if size is not None]
    scenario = spec.scenario
    drafts = scenario.draft_tokens
    # The drafter runs once a draft token, the target once a window on all of them.
    bytes_read = (target + drafts * sum(draft)) * _ELEMENT_BYTES.get(spec.dtype or pair.dtype, 2)
    operations = 2 * scenario.requests * ((drafts + 1) * target + drafts * sum(draft))
    window = bytes_read / machine.bytes_per_s
    if machine.flops is not None:
        window = max(window, operations / machine.flops)
    windows = scenario.max_new_tokens / (1 + drafts / 2) + PREFILL_WINDOWS
    host = _GPU_HOST_S if machine.flops is None else _CPU_HOST_S
    return windows * (window + host)


def run_seconds(pair: ResolvedPair, spec: RunSpec, machine: Machine) -> float | None:
    """About how long one run measures, engine start aside; at most, where a rule may end it."""
    each = batch_seconds(pair, spec, machine)
    if each is None:
        return spec.time_budget_s
    cells = spec.cells(pair.name)
    # On a CPU no SCV mode can fire: such cells run in the gate alone.
    live = [c for c in cells if machine.flops is None or c.scv_mode is ScvMode.OFF]
    least, most = spec.warmup_batches
    blocks = spec.stopping.max_blocks
    interleaved = 1 + blocks if spec.interleave is Interleave.WINDOWS else 0
    whole = min(blocks, len(CHECK_BLOCKS)) if interleaved else blocks
    whole += sum(spec.counted_blocks.values())
    warmup = max(least, min(WARMUP_LOOKBACK, most))
    batches = whole * len(live) + interleaved + len(cells) + warmup
    seconds = batches * each
    return seconds if spec.time_budget_s is None else min(seconds, spec.time_budget_s)


def duration(seconds: float | None) -> str:
    """`40 s`, `12 min`, `3.5 h`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _parameters(model: str) -> int | None:
    config = read_model_config(model)
    if config is None:
        return None
    try:
        return read_shape(config, "model", model).parameters()
    except BenchError:
        return None


def _gpu_bandwidth() -> float | None:
    """Bus width x highest memory clock x 2 (double data rate), in bytes a second."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        clock_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        return 2e6 * clock_mhz * pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    except pynvml.NVMLError:
        return None


def _try_cpu() -> Machine:
    """The best of a few copies and matrix products, as torch's are as fast as numpy's."""
    import numpy as np

    source = np.ones(1 << 24, dtype=np.float32)
    target = np.empty_like(source)
    square = np.ones((768, 768), dtype=np.float32)
    copies, products = [], []
    for _ in range(3):
        started = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - started)
        started = time.perf_counter()
        square @ square
        products.append(time.perf_counter() - started)
    return Machine(2 * source.nbytes / min(copies), 2 * 768**3 / min(products))
