"""What becomes of drafts under each of vLLM's speculative methods. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.models.support.engine import Device, EngineFacts, Runner
from nwor_bench.models.support.facts import ModelFacts
from nwor_bench.models.support.predict import Outcome, why_direct


class Method(StrEnum):
    """Methods of vLLM 0.32."""

    NGRAM = "ngram"
    NGRAM_GPU = "ngram_gpu"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MEDUSA = "medusa"


ON_V1 = frozenset({Method.SUFFIX, Method.MEDUSA})
"""Methods that vLLM serves with its V1 runner, on a GPU too."""

ON_V2 = frozenset({Method.DSPARK})
"""Methods that its V1 runner does not have."""

MTP_FAMILIES = (
    *("bailing_hybrid", "deepseek_v3", "deepseek_v4", "dots3_note", "ernie4_5_moe", "exaone4_5"),
    *("exaone_moe", "gemma4", "glm4_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "hy_v3", "hy_v4"),
    *("inkling", "intern_s2", "interns2", "kimi_k3", "longcat_flash", "mimo", "minimax_m3"),
    *("nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5", "step3p7"),
)
"""Beginnings of the model types whose MTP layers vLLM 0.32 drafts with."""

MTP_ARCHITECTURES = ("Glm4Moe", "GlmOcr", "MiMo")
"""Beginnings of the architectures by which it tells further ones, of whatever model type."""


@dataclass(frozen=True)
class MethodSupport:
    """One method: the runner that serves it, and what becomes of drafts."""

    method: Method
    outcome: Outcome
    runner: Runner | None
    reason: str | None


def method_support(model: ModelFacts, engine: EngineFacts, method: Method) -> MethodSupport:
    """The prediction for one method; REFUSED where vLLM cannot start with it."""
    refused = _why_refused(model, engine, method)
    if refused is not None:
        return MethodSupport(method, Outcome.REFUSED, None, refused)
    runner = Runner.V1 if engine.device is Device.CPU or method in ON_V1 else Runner.V2
    reason = why_direct(model, engine, runner)
    outcome = Outcome.STAGED if reason is None else Outcome.DIRECT
    return MethodSupport(method, outcome, runner, reason)


def methods_of(model: ModelFacts, engine: EngineFacts) -> Iterator[MethodSupport]:
    """Every method, in the order of `Method`."""
    return (method_support(model, engine, method) for method in Method)


def _why_refused(model: ModelFacts, engine: EngineFacts, method: Method) -> str | None:
    """Why vLLM would not start; None where nothing in the config speaks against it."""
    if method in ON_V2 and engine.device is Device.CPU:
        return "vLLM's V1 runner, a CPU's, does not have it"
    if method is not Method.MTP:
        return None
    by_type = model.model_type.startswith(MTP_FAMILIES)
    if not by_type and not model.architecture.startswith(MTP_ARCHITECTURES):
        return f"vLLM has no MTP for model type {model.model_type}"
    return "the config says that it has no MTP layers" if model.mtp_layers == 0 else None
