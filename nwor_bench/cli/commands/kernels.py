"""`nwor-bench kernels`: each kernel against its peers, on this machine's GPU."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.run.microbench.cases import ON_A_GPU, Shape, Spec
from nwor_bench.workload.options import Option


@dataclass(frozen=True)
class KernelsOptions:
    """Where the files go, and what is printed."""

    output: Annotated[Path | None, Option("Folder for the files (default: runs/TIME-kernels).")] = (
        None
    )
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags()
def kernels(options: KernelsOptions, spec: Spec, shape: Shape) -> None:
    """Check and time our kernels against vLLM's.

    Exit codes: 0 done, 2 bad input or no CUDA device, 3 a result was wrong.
    """
    from rich.console import Console

    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.device import visible_gpu_uuids

    if not visible_gpu_uuids():
        raise ConfigError.at("kernels needs a CUDA device and there is none here", ON_A_GPU)
    try:
        import triton  # noqa: F401  (our kernels and the timer are Triton's)

        from nwor_bench.run.microbench.bench import run_kernels
    except ImportError as error:
        raise ConfigError.at(f"kernels needs {error.name}", ON_A_GPU) from error
    first = spec.heads[0]
    run = replace(spec, shape=replace(shape, heads=first.query, kv_heads=first.kv))
    code = run_kernels(Console(), run, options.output, quiet=options.quiet, as_json=options.as_json)
    raise typer.Exit(code)
