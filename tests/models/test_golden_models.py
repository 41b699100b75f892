"""config.json of many models: `supports` and `plan` as kept, layers of Transformers' kinds."""

from typing import Any

import pytest
from golden_models import TABLE, configs, kept, rows

from nwor_bench.models.config_reader import Kind, kinds_of, text_entries
from nwor_bench.models.support.predict import Part
from nwor_bench.records.fallback_reasons import in_words

KINDS = {
    **{"full_attention": Kind.FULL, "attention": Kind.FULL, "indexed_attention": Kind.FULL},
    **{"sliding_attention": Kind.SLIDING, "chunked_attention": Kind.CHUNKED},
    **{"linear_attention": Kind.RECURRENT, "mamba": Kind.RECURRENT, "hybrid": Kind.BOTH},
    **{"moe": Kind.NOTHING, "mlp": Kind.NOTHING},
}

OTHERS = ("deepseek_v4", "mimo_v2_flash", "step3p5")
"""Families whose config.json says in other entries what Transformers does not read: their code."""


def theirs(config: dict[str, Any]) -> list[Kind] | None:
    """The kinds that Transformers makes of a config.json; None if it refuses it or knows none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config.get("model_type")
    if family not in CONFIG_MAPPING or family.startswith(OTHERS):
        return None
    entries = {name: value for name, value in config.items() if name != "model_type"}
    try:
        words = getattr(CONFIG_MAPPING[family](**entries), "layer_types", None)
    except Exception:  # its validators raise many types of errors
        return None
    return [KINDS[word] for word in words] if words else None


@pytest.mark.slow  # imports transformers
def test_kinds_are_those_of_transformers() -> None:
    """Without a window in the config.json Transformers takes another model's."""
    texts = {name: text_entries(config) for name, config in configs()}
    found = {name: theirs(text) for name, text in texts.items() if "inner" not in name}
    known = {name: kinds for name, kinds in found.items() if kinds is not None}
    assert len({texts[name]["model_type"] for name in known}) >= 30
    assert {name: list(kinds_of(texts[name])) for name in known} == known


def test_every_reason_is_told_in_words() -> None:
    answers = {row.answer for row in kept() if row.digest and not row.asked.startswith("plan")}
    reasons = answers - {part.value for part in Part}
    assert len(reasons) > 15
    sizes = ("head_dim_", "window_of_")  # they are words
    assert not [r for r in reasons if in_words(r) == r and not r.startswith(sizes)]


@pytest.mark.slow  # two thousand answers
def test_every_answer_is_the_kept_one() -> None:
    wanted, found = kept(), list(rows())
    changed = sorted(set(found) - set(wanted))
    assert changed == [], f"decide, then write {TABLE.name} anew (golden_models.py)"
    assert len(found) == len(wanted)
