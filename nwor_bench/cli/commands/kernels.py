"""`nwor-bench kernels`: each kernel against its peers, on this machine's GPU."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError
from nwor_bench.run.microbench.cases import ON_A_GPU, Heads, Shape, Spec
from nwor_bench.workload.options import Option, Panel


@dataclass(frozen=True)
class KernelsOptions:
    """Where the files go, and what is printed."""

    output: Annotated[Path | None, Option("Folder for the files (default: runs/TIME-kernels).")] = (
        None
    )
    model: Annotated[str | None, Option(
        "Heads, head dimension and layers of this model: a pair, folder, hub name or config.json.",
        Panel.SHAPE,
    )] = None  # fmt: skip
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags()
def kernels(options: KernelsOptions, spec: Spec, shape: Shape) -> None:
    """Check and time our kernels against vLLM's.

    Exit codes: 0 done, 2 bad input or no CUDA device, 3 a result was wrong.
    """
    from rich.console import Console

    from nwor_bench.instruments.device import visible_gpu_uuids

    if options.model is not None:
        spec, shape = _of_model(options.model, spec, shape)
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


def _of_model(model: str, spec: Spec, shape: Shape) -> tuple[Spec, Shape]:
    """Heads and layers of a model's attention that sees the whole context. Raises ConfigError."""
    from nwor_bench.models.config_json import read_shape
    from nwor_bench.models.pairs.local import find_config

    if (spec.heads, shape.layers, shape.head_dim) != (Spec.heads, Shape.layers, Shape.head_dim):
        remedy = "it gives --heads, --layers and --head-dim; leave these out"
        raise ConfigError.for_field("--model", model, remedy)
    of_model = read_shape(find_config("--model", model).config, "--model", model)
    every = [of_model.heads_of(layer) for layer in of_model.attending if layer.window is None]
    kinds = Counter(heads for heads in every if heads.dim == heads.value_dim)
    if of_model.mla is not None or not kinds:
        remedy = "name a model with layers of plain K/V heads that attend to the whole context"
        raise ConfigError.for_field("--model", model, remedy)
    (heads, layers), *_ = kinds.most_common(1)
    spec = replace(spec, heads=(Heads(heads.queries, heads.kv),))
    return spec, replace(shape, layers=layers, head_dim=heads.dim)
