"""`nwor-bench doctor`: checks of what this machine can measure, each with a remedy."""

from collections.abc import Callable

from nwor_bench.cli.doctor.check import Check, State, can_sweep
from nwor_bench.cli.doctor.machine import check_clocks, check_driver, check_gpu, check_memory
from nwor_bench.cli.doctor.profilers import check_cupti, check_nsight, check_nvtx, check_permission
from nwor_bench.cli.doctor.software import (
    check_openmp,
    check_plugin,
    check_torch,
    check_vllm,
)
from nwor_bench.instruments import environment
from nwor_bench.records.environment import CpuFacts

__all__ = ["Check", "State", "can_sweep", "examine"]


def examine(check_hooks: Callable[[], Check] | None = None) -> list[Check]:
    """All checks; those that a sweep needs come first.

    Args:
        check_hooks: starts a tiny engine and tries the hooks on it; None skips this check.
    """
    facts = environment.collect()
    gpus = facts.gpus or ()
    cpu = facts.cpu or CpuFacts()
    checks = [
        check_vllm(),
        check_torch(bool(gpus)),
        check_plugin(),
        check_openmp(),
        check_gpu(gpus, facts.gpu_note),
        check_driver(gpus),
        check_clocks(gpus, cpu.governor),
        check_memory(),
    ]
    if check_hooks is not None:
        if can_sweep(checks):
            checks.append(check_hooks())
        else:
            what = "not tried: an engine needs a check above that failed"
            checks.append(Check("hooks", State.MISSING, what, "see above", needed=True))
    has_gpu = bool(gpus)
    return [
        *checks,
        check_permission(has_gpu),
        check_cupti(has_gpu),
        check_nsight("ncu"),
        check_nsight("nsys"),
        check_nvtx(),
    ]
