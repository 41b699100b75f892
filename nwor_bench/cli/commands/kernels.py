"""`nwor-bench kernels`: each kernel against its peers, on this machine's GPU."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet

_WORK = partial(typer.Option, rich_help_panel="What to time")
_SHAPE = partial(typer.Option, rich_help_panel="The model's shape")
_PRECISION = partial(typer.Option, rich_help_panel="When to stop")
_OUTPUT = partial(typer.Option, rich_help_panel="Output")

HEAD_DIMS, BLOCK_SIZES = (64, 96, 128, 256), (16, 32, 64, 128)


def kernels(
    kernels: Annotated[
        str, _WORK(help="Some of commit, verify_attention, gated_delta.")
    ] = "commit,verify_attention",
    windows: Annotated[str, _WORK(help="Requests x drafts.")] = "8x4,64x4,64x8,256x8",
    acceptance: Annotated[
        str, _WORK(help="Accepted drafts over drafts; for commit.")
    ] = "0.1,0.5,0.9",
    context: Annotated[
        str, _WORK(help="Cached tokens per request; for verify_attention.")
    ] = "1024",
    cache_dtype: Annotated[str, _WORK(help="bf16, fp8.")] = "bf16,fp8",
    layers: Annotated[int, _SHAPE(help="Target layers.")] = 28,
    heads: Annotated[
        str, _SHAPE(help="Query heads / K/V heads; a commit has the first ones.")
    ] = "24/8,32/4",
    head_dim: Annotated[int, _SHAPE(help="Head dimension.")] = 128,
    block_size: Annotated[int, _SHAPE(help="Tokens per cache block.")] = 16,
    rounds: Annotated[int, _PRECISION(help="Most rounds of a case.")] = 30,
    ci_width: Annotated[
        str, _PRECISION(help="Stop a case when each ratio is known to +- this much.")
    ] = "1%",
    seed: Annotated[int, typer.Option(help="Seed of inputs and order.")] = 0,
    output: Annotated[
        Path | None, _OUTPUT(help="Folder for the files (default: runs/TIME-kernels).")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check and time our kernels against vLLM's.

    Exit codes: 0 done, 2 bad input or no CUDA device, 3 a result was wrong.
    """
    from annotated_types import Ge
    from pydantic import PositiveInt
    from rich.console import Console

    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.device import visible_gpu_uuids
    from nwor_bench.microbench import cases
    from nwor_bench.workload.options import read_as
    from nwor_bench.workload.stopping import parse_fraction

    every = cases.parse_heads(heads)
    spec = cases.Spec(
        kernels=read_as(tuple[cases.Kernel, ...], "--kernels", kernels),
        windows=cases.parse_windows(windows),
        acceptances=cases.parse_acceptances(acceptance),
        contexts=read_as(tuple[PositiveInt, ...], "--context", context),
        cache_dtypes=read_as(tuple[cases.CacheDtype, ...], "--cache-dtype", cache_dtype),
        heads=every,
        shape=cases.Shape(
            read_as(Annotated[int, Ge(1)], "--layers", layers),
            every[0].query,
            every[0].kv,
            _one_of("--head-dim", head_dim, HEAD_DIMS),
            _one_of("--block-size", block_size, BLOCK_SIZES),
        ),
        max_rounds=read_as(Annotated[int, Ge(3)], "--rounds", rounds),
        ci_width=parse_fraction("--ci-width", ci_width),
        seed=seed,
    )
    try:
        if not visible_gpu_uuids():
            problem = "kernels needs a CUDA device and there is none here"
            raise ConfigError.at(problem, cases.ON_A_GPU)
        import triton  # noqa: F401  (our kernels and the timer are Triton's)

        from nwor_bench.microbench.bench import run_kernels
    except ImportError as error:
        raise ConfigError.at(f"kernels needs {error.name}", cases.ON_A_GPU) from error
    raise typer.Exit(run_kernels(Console(), spec, output, quiet=quiet, as_json=as_json))


def _one_of(flag: str, value: int, known: tuple[int, ...]) -> int:
    from nwor_bench.errors import ConfigError

    if value not in known:
        *most, last = map(str, known)
        raise ConfigError.for_field(flag, value, f"write {', '.join(most)} or {last}")
    return value
