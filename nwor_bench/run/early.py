"""Refusals of a sweep before pandas, PyTorch and vLLM are imported, which takes seconds."""

from dataclasses import replace
from pathlib import Path

from nwor_bench.engine.memory import require_memory
from nwor_bench.engine.preflight import check_flags, check_pair
from nwor_bench.errors import ConfigError
from nwor_bench.instruments.device import float32_reason
from nwor_bench.models.pairs import (
    ResolvedPair,
    check_hub_models,
    load_pair,
    pair_folder,
    resolve_pair,
)
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import RunStatus
from nwor_bench.workload.run_spec import DEFAULT_PAIR, PairChoice, RunSpec
from nwor_bench.workload.sweep_file import SweepFile, make_points

_TOKENIZERS = ("*token*", "*vocab*", "*tekken*", "*.model", "*.spm", "*.bpe", "*.py")
"""Files that a tokenizer may be read from."""


def check_run(spec: RunSpec, choice: PairChoice) -> None:
    """Refuse a run that cannot start, as far as its models are on this machine.

    Raises ConfigError.
    """
    check_flags(spec)
    choice = choice.with_config(spec.speculative_config)
    if choice.target_model is None:
        folder = pair_folder(load_pair(choice.pair or DEFAULT_PAIR))
        if not folder.is_dir():  # it is built or fetched later
            return
    pair = resolve_pair(
        choice.pair,
        target_model=choice.target_model,
        draft_model=choice.draft_model,
        method=choice.method,
    )
    check_pair(pair, spec)
    _check_tokenizer(pair.target)
    require_memory(with_own_dtype(pair, spec)[0], spec)
    check_hub_models(pair)


def check_sweep(sweep: SweepFile) -> None:
    """Refuse a sweep file with a run that cannot start. Raises ConfigError that names the run."""
    for point in make_points(sweep):
        try:
            check_run(point.spec, PairChoice(pair=point.pair))
        except ConfigError as error:
            raise error.within(f"run {point.number} ({point.label})") from error


def with_own_dtype(pair: ResolvedPair, spec: RunSpec) -> tuple[ResolvedPair, str | None]:
    """The pair in the dtype that it runs in here, and why if that is not its own."""
    note = float32_reason(pair.dtype) if spec.dtype is None else None
    return (pair, None) if note is None else (replace(pair, dtype="float32"), note)


def require_incomplete(header: RunHeader, folder: str) -> None:
    """Raises ConfigError for a run that is complete."""
    if header.status is RunStatus.COMPLETE:
        remedy = "this run is complete; `nwor-bench report` shows it"
        raise ConfigError.for_field("--resume", folder, remedy)


def _check_tokenizer(target: str) -> None:
    """Refuse a model folder that no tokenizer can be read from."""
    folder = Path(target)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        remedy = "it has no tokenizer; name a folder with tokenizer files"
        raise ConfigError.for_field("--target-model", target, remedy)
