"""Checks of profilers: permission to read the GPU's counters, CUPTI, Nsight's tools, NVTX."""

import os
import re
import subprocess
import sys
from pathlib import Path

from nwor_bench.cli.doctor.check import Check, State, what_and_remedy
from nwor_bench.cli.doctor.software import installed
from nwor_bench.errors import ConfigError
from nwor_bench.instruments.cupti_library import cupti_environment, cupti_folder
from nwor_bench.instruments.nsight.tools import PRODUCT, ToolUnavailable, check_version, find_tool
from nwor_bench.instruments.nvtx_ranges import open_ranges, wanted

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21
"""Bit of the capability that the driver asks for (linux/capability.h)."""

PERMIT = (
    "run as root, start the container with --cap-add=SYS_ADMIN, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)

COUNT_ONCE = (
    "from nwor_bench.errors import BenchError\n"
    "from nwor_bench.instruments.pm_sampling import check_counters\n"
    "try:\n    check_counters(lambda: True)\n"
    "except BenchError as refusal:\n    raise SystemExit(str(refusal))\n"
)


def check_permission(has_gpu: bool) -> Check:
    """Whether the driver lets this user read hardware counters."""
    name = "counters"
    if not has_gpu:
        return Check(name, State.MISSING, "no GPU", "see GPU")
    try:
        restricted = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
        status = PROCESS_STATUS.read_text()
    except OSError as error:
        what = f"the driver does not say who may read counters ({error.strerror})"
        return Check(name, State.MISSING, what, f"if a profiler is refused: {PERMIT}")
    if not restricted:
        return Check(name, State.OK, "every user may read hardware counters")
    if _is_admin(status):
        return Check(name, State.OK, "for administrators only, and this process is one")
    return Check(name, State.WRONG, "for administrators only", PERMIT)


def _is_admin(status: str) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def check_cupti(has_gpu: bool) -> Check:
    """Whether CUPTI can sample this GPU's counters, tried in a process of its own."""
    install = "pip install 'nwor-bench[counters]'; without it there is no --counters dram"
    found = installed("cupti-python")
    if found is None:
        return Check("CUPTI", State.MISSING, "the package cupti-python is not installed", install)
    if not has_gpu:
        return Check("CUPTI", State.MISSING, f"cupti-python {found}, but no GPU", "see GPU")
    environ = cupti_environment(os.environ, cupti_folder()) or dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        command = [sys.executable, "-c", COUNT_ONCE]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        remedy = "end other profilers, which may hold the counters"
        return Check("CUPTI", State.WRONG, f"cupti-python {found} does not answer", remedy)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        what, remedy = what_and_remedy(said.removeprefix("--counters dram: "))
        return Check("CUPTI", State.WRONG, what, remedy or install)
    return Check("CUPTI", State.OK, f"cupti-python {found} samples the GPU's counters")


def check_nsight(tool: str) -> Check:
    """Whether `ncu` or `nsys` is installed, runs, and is new enough."""
    try:
        path = find_tool(tool)
    except ToolUnavailable as error:
        return _refused(tool, State.MISSING, error)
    try:
        found = check_version(tool, path)
    except ToolUnavailable as error:
        return _refused(tool, State.WRONG, error)
    return Check(tool, State.OK, f"{PRODUCT[tool]} {found}, {path}")


def _refused(tool: str, state: State, error: ToolUnavailable) -> Check:
    what, remedy = what_and_remedy(re.sub(r"^profile[^:]*: ", "", str(error)))
    return Check(tool, state, what, remedy)


def check_nvtx() -> Check:
    """Whether the package nvtx is installed and loads."""
    found = installed("nvtx")
    if found is None:
        return Check("NVTX", State.MISSING, "the package nvtx is not installed", "pip install nvtx")
    if os.environ.get("NVTX_DISABLE"):
        return Check("NVTX", State.WRONG, "NVTX_DISABLE disables ranges", "unset NVTX_DISABLE")
    try:
        wanted()
        open_ranges({})
    except ConfigError as error:
        what, remedy = what_and_remedy(str(error))
        return Check("NVTX", State.WRONG, what, remedy)
    return Check("NVTX", State.OK, f"nvtx {found}, domain nwor-bench; on under a profiler")
