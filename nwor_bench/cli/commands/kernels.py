"""`nwor-bench kernels`: each kernel against its peers, on this machine's GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet

if TYPE_CHECKING:
    from nwor_bench.microbench.cases import Heads, Shape

WORK = "What to time"
SHAPE = "The model's shape"
PRECISION = "When to stop"
OUTPUT = "Output"


def kernels(
    kernels: Annotated[
        str, typer.Option(help="Some of commit, verify_attention, gated_delta.",
                          rich_help_panel=WORK)
    ] = "commit,verify_attention",
    windows: Annotated[
        str, typer.Option(help="Requests x drafts.", rich_help_panel=WORK)
    ] = "8x4,64x4,64x8,256x8",
    acceptance: Annotated[
        str, typer.Option(help="Accepted drafts over drafts; for commit.",
                          rich_help_panel=WORK)
    ] = "0.1,0.5,0.9",
    context: Annotated[
        str, typer.Option(help="Cached tokens per request; for verify_attention.",
                          rich_help_panel=WORK)
    ] = "1024",
    cache_dtype: Annotated[
        str, typer.Option(help="bf16, fp8.", rich_help_panel=WORK)
    ] = "bf16,fp8",
    layers: Annotated[int, typer.Option(help="Target layers.", rich_help_panel=SHAPE)] = 28,
    heads: Annotated[
        str, typer.Option(help="Query heads / K/V heads; a commit has the first ones.",
                          rich_help_panel=SHAPE)
    ] = "24/8,32/4",
    head_dim: Annotated[int, typer.Option(help="Head dimension.", rich_help_panel=SHAPE)] = 128,
    block_size: Annotated[
        int, typer.Option(help="Tokens per cache block.", rich_help_panel=SHAPE)
    ] = 16,
    rounds: Annotated[
        int, typer.Option(help="Most rounds of a case.", rich_help_panel=PRECISION)
    ] = 30,
    ci_width: Annotated[
        str, typer.Option(help="Stop a case when each ratio is known to +- this much.",
                          rich_help_panel=PRECISION)
    ] = "1%",
    seed: Annotated[int, typer.Option(help="Seed of inputs and order.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files (default: runs/TIME-kernels).",
                                  rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Check and time our kernels against vLLM's.

    Exit codes: 0 done, 2 bad input or no CUDA device, 3 a result was wrong.
    """
    from pydantic import PositiveInt
    from rich.console import Console

    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.device import visible_gpu_uuids
    from nwor_bench.microbench.cases import (
        ON_A_GPU,
        CacheDtype,
        Kernel,
        Spec,
        parse_acceptances,
        parse_heads,
        parse_windows,
    )
    from nwor_bench.workload.options import read_as
    from nwor_bench.workload.stopping import parse_fraction

    every = parse_heads(heads)
    spec = Spec(
        kernels=read_as(tuple[Kernel, ...], "--kernels", kernels),
        windows=parse_windows(windows),
        acceptances=parse_acceptances(acceptance),
        contexts=read_as(tuple[PositiveInt, ...], "--context", context),
        cache_dtypes=read_as(tuple[CacheDtype, ...], "--cache-dtype", cache_dtype),
        heads=every,
        shape=_shape(layers, every[0], head_dim, block_size),
        max_rounds=_at_least("--rounds", rounds, 3),
        ci_width=parse_fraction("--ci-width", ci_width),
        seed=seed,
    )
    if not visible_gpu_uuids():
        raise ConfigError.at("kernels needs a CUDA device and there is none here", ON_A_GPU)
    from nwor_bench.microbench.bench import run_kernels  # imports pandas and scipy

    raise typer.Exit(run_kernels(Console(), spec, output, quiet=quiet, as_json=as_json))


def _shape(layers: int, heads: "Heads", head_dim: int, block_size: int) -> "Shape":
    from nwor_bench.errors import ConfigError
    from nwor_bench.microbench.cases import Shape

    _at_least("--layers", layers, 1)
    if head_dim not in (64, 96, 128, 256):
        raise ConfigError.for_field("--head-dim", head_dim, "write 64, 96, 128 or 256")
    if block_size not in (16, 32, 64, 128):
        raise ConfigError.for_field("--block-size", block_size, "write 16, 32, 64 or 128")
    return Shape(layers, heads.query, heads.kv, head_dim, block_size)


def _at_least(flag: str, value: int, least: int) -> int:
    from nwor_bench.errors import ConfigError

    if value < least:
        raise ConfigError.for_field(flag, value, f"write {least} or more")
    return value
