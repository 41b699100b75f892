"""Speculative methods of vLLM 0.32 and 0.33: which need a drafter, which models have MTP layers."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from nwor_bench.errors import ConfigError


class Method(StrEnum):
    """Names of `speculative_config`'s method that `sweep` takes and `plan` lists."""

    NGRAM = "ngram"
    NGRAM_GPU = "ngram_gpu"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"
    DSPARK = "dspark"


WITHOUT_DRAFTER = frozenset({Method.NGRAM, Method.NGRAM_GPU, Method.SUFFIX})
"""They draft from the tokens so far and take no drafter."""

FROM_TARGET = frozenset({Method.MTP, Method.DSPARK})
"""Without a drafter they take the target's own layers."""

PROMPT_LOOKUP = frozenset({Method.NGRAM, Method.NGRAM_GPU})

NOT_ON_CPU = {
    Method.NGRAM_GPU: "it drafts on a GPU; write --method ngram",
    Method.DSPARK: "it needs vLLM's V2 runner, and a CPU has the V1 runner",
}
"""Methods that vLLM cannot run on a CPU, and the reason or what to write."""

MTP_FAMILIES = (
    *("bailing_hybrid", "deepseek_v3", "deepseek_v4", "dots3_note", "ernie4_5_moe", "exaone4_5"),
    *("exaone_moe", "gemma4", "glm4_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "hy_v3", "hy_v4"),
    *("inkling", "intern_s2", "interns2", "kimi_k3", "longcat_flash", "mimo", "minimax_m3"),
    *("nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5", "step3p7"),
    "step5",  # since 0.33
)
"""Beginnings of the model types whose MTP layers vLLM drafts with."""

MTP_ARCHITECTURES = ("Glm4Moe", "GlmOcr", "MiMo")
"""Beginnings of further architectures that it drafts with, of any model type."""

_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def check_method(field: str, method: str) -> None:
    """Raise ConfigError for a method that `sweep` does not take."""
    if method not in list(Method):
        raise ConfigError.unknown(field, method, Method)


def mtp_layers(text: Mapping[str, Any]) -> int | None:
    """Number of MTP layers of a config.json; None if it has no such entry."""
    layers = next((text[key] for key in _MTP_LAYERS if text.get(key) is not None), None)
    if layers is None:
        return None
    return layers if isinstance(layers, int) and not isinstance(layers, bool) else 0


def why_no_mtp(model_type: str, architecture: str, layers: int | None) -> str | None:
    """Why vLLM would not draft with the model's MTP layers; None if the config shows no reason."""
    if not model_type.startswith(MTP_FAMILIES) and not architecture.startswith(MTP_ARCHITECTURES):
        return f"vLLM has no MTP for model type {model_type}"
    return "the config says that it has no MTP layers" if layers == 0 else None
