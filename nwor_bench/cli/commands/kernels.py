"""`nwor-bench kernels`: each kernel against its peers, on this machine's GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.cli.command import AsJson, Quiet
from nwor_bench.cli.commands.sweep import of_holders, with_flags
from nwor_bench.microbench.cases import ON_A_GPU, Shape, Spec
from nwor_bench.workload.options import read_all


@with_flags(Spec, Shape)
def kernels(
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files (default: runs/TIME-kernels).")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **flags: Any,
) -> None:
    """Check and time our kernels against vLLM's.

    Exit codes: 0 done, 2 bad input or no CUDA device, 3 a result was wrong.
    """
    from rich.console import Console

    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.device import visible_gpu_uuids

    spec = read_all(Spec, of_holders(flags, Spec))
    first = spec["heads"][0]
    shape = Shape(**read_all(Shape, of_holders(flags, Shape)), heads=first.query, kv_heads=first.kv)
    if not visible_gpu_uuids():
        raise ConfigError.at("kernels needs a CUDA device and there is none here", ON_A_GPU)
    try:
        import triton  # noqa: F401  (our kernels and the timer are Triton's)

        from nwor_bench.microbench.bench import run_kernels
    except ImportError as error:
        raise ConfigError.at(f"kernels needs {error.name}", ON_A_GPU) from error
    run = Spec(**spec, shape=shape)
    raise typer.Exit(run_kernels(Console(), run, output, quiet=quiet, as_json=as_json))
