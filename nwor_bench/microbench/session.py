"""One call of `nwor-bench kernels`: refuse early, measure, write, print."""

import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.microbench.cases import Group, Spec, expand
from nwor_bench.microbench.console import print_plan, print_result
from nwor_bench.microbench.report import Result, write_files
from nwor_bench.microbench.rows import Row
from nwor_bench.microbench.run import Bench, run_groups
from nwor_bench.records.store import RUNS, default_folder

FILES = ("kernels.csv", "kernels.json", "kernels.md")


def plan_session(console: Console, spec: Spec) -> int:
    """Print the cases and about how long they take; needs no GPU."""
    print_plan(console, spec, expand(spec))
    return ExitCode.OK


def run_kernels(
    console: Console,
    spec: Spec,
    output: Path | None,
    *,
    make_bench: Callable[[Spec], tuple[Bench, dict[str, Any]]] | None = None,
) -> int:
    """Measure, write the files, print; the exit code.

    Args:
        output: the files' folder; runs/<UTC time>-kernels if None.
        make_bench: what times; the current CUDA device if None.

    Raises:
        ConfigError: no CUDA device, or the folder cannot take the files.
    """
    folder = output or default_folder(RUNS, "kernels", "", datetime.now(UTC))
    _check_folder(folder)
    begun = perf_counter()
    bench, facts = (make_bench or _cuda_bench)(spec)
    groups = expand(spec)
    rows = run_groups(bench, groups, _progress(console, len(groups), begun))
    command = shlex.join(["nwor-bench", *sys.argv[1:]])
    elapsed_s = perf_counter() - begun
    result = Result(spec, rows, command, facts, environment.collect(), elapsed_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, str(error.strerror)) from error
    print_result(console, result, write_files(folder, result))
    return ExitCode.CORRECTNESS_BROKEN if result.invalid else ExitCode.OK


def _cuda_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    require_cuda()
    from nwor_bench.microbench.device import make_bench

    return make_bench(spec)


def require_cuda() -> None:
    """Raise ConfigError unless PyTorch sees a CUDA device and Triton is here."""
    remedy = (
        "run it on a machine with an NVIDIA GPU, set up by `make venv DEVICE=cuda`; "
        "--dry-run shows the cases without one"
    )
    try:
        import torch
        import triton
    except ImportError as error:
        raise ConfigError(f"kernels needs {error.name}: {remedy}") from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"kernels needs a CUDA device and PyTorch {torch.__version__} (Triton "
            f"{triton.__version__}) sees none: {remedy}"
        )


def _progress(console: Console, groups: int, begun: float) -> Callable[[Group, list[Row]], None]:
    """Tells a line for each group as it is done, on a terminal alone."""
    done = 0

    def tell(group: Group, rows: list[Row]) -> None:
        nonlocal done
        done += 1
        if console.is_terminal:
            seconds = perf_counter() - begun
            console.print(f"[{done}/{groups}] {group.label} ({seconds:.0f} s)", markup=False)

    return tell


def _check_folder(folder: Path) -> None:
    """Refuse early: files are in the way, or the folder would have to be made inside a file."""
    if any((folder / name).exists() for name in FILES):
        raise _unusable(folder, "it already holds a kernel run")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise _unusable(folder, f"{nearest} is a file")


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError.for_field("--output", str(folder), f"{why}; name a new folder")
