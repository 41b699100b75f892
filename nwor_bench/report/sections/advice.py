"""Commands and settings that fit the run that they are written for."""

from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.types import CellResult
from nwor_bench.report.sections.bytes import plan_model


def own_models(header: RunHeader) -> bool:
    """True if the reader named the models, instead of a pair that ships with nwor-bench."""
    return (header.choice or {}).get("target_model") is not None


def switched_on(header: RunHeader, cell: CellResult) -> str:
    """The environment variables that give `vllm serve` this cell as it was measured."""
    spec = header.spec or {}
    variables = {"VLLM_NWOR_MODE": str(cell.nwor_mode), "VLLM_SCV_MODE": str(cell.scv_mode)}
    if cell.nwor_mode == "stage" and spec.get("stage_by") not in (None, "reference"):
        variables["VLLM_NWOR_STAGE_BY"] = str(spec["stage_by"])
    return " ".join(f"{name}={value}" for name, value in variables.items())


def plan_words(header: RunHeader) -> str:
    """`nwor-bench plan`, with the file that it needs where it cannot find the model by itself."""
    if header.pair is not None and header.pair.target and plan_model(header) is None:
        return "nwor-bench plan --config CONFIG.JSON (the target's)"
    return "nwor-bench plan"


def gpu_command(header: RunHeader) -> str:
    """The command that answers on a GPU: with the reader's models where these are known."""
    choice, pair = header.choice or {}, header.pair or PairFacts()
    target = choice.get("target_model") or "MODEL"
    drafter = (
        "--method ngram"
        if pair.method == "ngram"
        else f"--draft-model {choice.get('draft_model') or 'MODEL'}"
    )
    return f"nwor-bench sweep --target-model {target} {drafter} --ci-width 0.5%"
