"""Run `nwor-bench kernels`: check the machine and folder, measure, write, print."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.microbench.bench import Bench, run_groups
from nwor_bench.microbench.cases import Group, Spec, expand
from nwor_bench.microbench.report import (
    document,
    json_content,
    plan_document,
    plan_facts,
    write_files,
)
from nwor_bench.microbench.rows import Result, Row
from nwor_bench.records.files import result_document
from nwor_bench.records.run_folder import RUNS, default_folder
from nwor_bench.report.terminal import print_document, print_path

FILES = ("kernels.csv", "kernels.json", "kernels.md")


@dataclass(frozen=True)
class Shown:
    """What a kernel run prints."""

    quiet: bool = False
    """Only the answer and the files, or a dry run's expected time."""

    as_json: bool = False
    """Only one JSON document."""


ALL = Shown()


def show_plan(console: Console, spec: Spec, shown: Shown = ALL) -> int:
    """Print the cases and their expected time; needs no GPU."""
    groups = expand(spec)
    if shown.as_json:
        sys.stdout.write(result_document(plan_facts(spec, groups)))
    else:
        print_document(console, plan_document(spec, groups), quiet=shown.quiet)
    return ExitCode.OK


def run_kernels(
    console: Console,
    spec: Spec,
    output: Path | None,
    *,
    shown: Shown = ALL,
    make_bench: Callable[[Spec], tuple[Bench, dict[str, Any]]] | None = None,
) -> int:
    """Measure, write the files and print them; returns the exit code.

    Args:
        output: folder for the files; None: runs/<UTC time>-kernels.
        shown: what is printed.
        make_bench: makes the bench; None: the one on the current CUDA device.

    Raises:
        ConfigError: no CUDA device, or the files cannot be written to the folder.
    """
    folder = output or default_folder(RUNS, "kernels", "", datetime.now(UTC))
    _check_folder(folder)
    begun = perf_counter()
    bench, facts = (make_bench or _cuda_bench)(spec)
    groups = expand(spec)
    rows = run_groups(bench, groups, _progress(console, len(groups), begun, shown))
    command = shlex.join(["nwor-bench", *sys.argv[1:]])
    elapsed_s = perf_counter() - begun
    result = Result(spec, rows, command, facts, environment.collect(), elapsed_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, str(error.strerror)) from error
    files = write_files(folder, result)
    if shown.as_json:
        named = {"folder": str(folder), "files": list(map(str, files))}
        sys.stdout.write(result_document({**named, **json_content(result)}))
    else:
        print_document(console, document(result).shortened(), quiet=shown.quiet)
        print_path(console, "Files", ", ".join(map(str, files)))
    return ExitCode.CORRECTNESS_BROKEN if result.invalid else ExitCode.OK


def _cuda_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    require_cuda()
    from nwor_bench.microbench.cuda_bench import make_bench

    return make_bench(spec)


def require_cuda() -> None:
    """Raise ConfigError unless PyTorch sees a CUDA device and Triton is installed."""
    remedy = (
        "run it on a machine with an NVIDIA GPU, set up by `make venv DEVICE=cuda`; "
        "--dry-run shows the cases without one"
    )
    try:
        import torch
        import triton
    except ImportError as error:
        raise ConfigError.at(f"kernels needs {error.name}", remedy) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"kernels needs a CUDA device and PyTorch {torch.__version__} (Triton "
            f"{triton.__version__}) sees none: {remedy}"
        )


def _progress(
    console: Console, groups: int, begun: float, shown: Shown
) -> Callable[[Group, list[Row]], None]:
    """A callback that prints one line per finished group, on a terminal only."""
    done = 0
    prints = console.is_terminal and not shown.quiet and not shown.as_json

    def print_group(group: Group, rows: list[Row]) -> None:
        nonlocal done
        done += 1
        if prints:
            seconds = perf_counter() - begun
            console.print(f"[{done}/{groups}] {group.label} ({seconds:.0f} s)", markup=False)

    return print_group


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds a kernel run, or whose path leads through a file."""
    if any((folder / name).exists() for name in FILES):
        raise _unusable(folder, "it already holds a kernel run")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise _unusable(folder, f"{nearest} is a file")


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError.for_field("--output", str(folder), f"{why}; name a new folder")
