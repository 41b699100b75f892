"""What becomes of windows under each speculative method and setting, and which test shows it."""

from dataclasses import dataclass

from nwor_bench.models.support.methods import Method
from nwor_bench.records import fallback_reasons as reasons

HEADERS = ("method or setting", "on a CPU", "on a GPU")

_V1_ON_GPU = f"written directly: `{reasons.V1_RUNNER_ON_GPU}`"
_CHECKLIST = "tests/live_engine/test_gpu_checklist_engines.py"
_METHODS = "tests/live_engine/test_gpu_methods.py"
_DRAFTERS = "tests/live_engine/test_checklist_drafters.py"
_PARITY = "tests/live_engine/test_engine_parity.py::test_stage_gives_the_tokens_of_off"


@dataclass(frozen=True)
class Shown:
    """One method or setting."""

    name: str
    cpu: str
    """The test that stages it on a CPU engine, or what stands against it."""
    gpu: str
    """The test that stages it on a GPU, or why windows are written directly."""


METHODS = (
    Shown(Method.NGRAM.value, _PARITY, f"{_CHECKLIST}::test_prompt_lookup"),
    Shown(Method.NGRAM_GPU.value, "vLLM pins memory for it", f"{_METHODS}::test_ngram_gpu"),
    Shown(Method.SUFFIX.value, "needs the package arctic-inference", _V1_ON_GPU),
    Shown(
        Method.DRAFT_MODEL.value,
        _PARITY,
        "tests/live_engine/test_gpu_windows.py::test_staging_gives_the_stock_tokens",
    ),
    Shown(
        Method.EAGLE.value,
        "tests/live_engine/test_engine_eagle.py::test_the_head_is_told_from_the_targets_layers",
        f"{_CHECKLIST}::test_a_drafter_in_the_targets_cache_group",
    ),
    Shown(
        Method.EAGLE3.value,
        f"{_DRAFTERS}::test_a_drafter_in_the_targets_cache_group",
        f"{_CHECKLIST}::test_a_drafter_in_the_targets_cache_group",
    ),
    Shown(
        Method.MTP.value,
        f"{_DRAFTERS}::test_a_drafter_in_the_targets_cache_group",
        f"{_CHECKLIST}::test_a_drafter_in_the_targets_cache_group",
    ),
    Shown(
        Method.DFLASH.value,
        "not tried: its layers see a block in both directions",
        f"{_METHODS}::test_a_drafter_of_whole_blocks",
    ),
    Shown(
        Method.DSPARK.value,
        "vLLM's V1 runner does not have it",
        f"{_METHODS}::test_a_drafter_of_whole_blocks",
    ),
    Shown(Method.MEDUSA.value, "not tried", _V1_ON_GPU),
)
"""Each of vLLM's methods once."""

SETTINGS = (
    Shown(
        "drafts by batch size (`num_speculative_tokens_per_batch_size`)",
        "tests/live_engine/test_methods.py::test_drafts_whose_number_follows_the_batch",
        f"{_METHODS}::test_drafts_whose_number_follows_the_batch",
    ),
    Shown(
        "block verification (`rejection_sample_method`)",
        "vLLM's V1 runner verifies one draft at a time",
        f"{_METHODS}::test_block_verification",
    ),
    Shown(
        'FLy verification (`rejection_sample_method="fly"`, vLLM 0.33): lossy, its output does not '
        "follow the target's distribution, staged or not",
        "not tried",
        _V1_ON_GPU,
    ),
    Shown("parallel drafting with EAGLE or a draft model", "not tried", _V1_ON_GPU),
    Shown("a draft model of another vocabulary", "not tried", _V1_ON_GPU),
    Shown(
        "adaptive verification (dspark)",
        "vLLM's V1 runner does not have it",
        "written directly: `adaptive_verification`",
    ),
)


def shown_rows() -> list[tuple[str, str, str]]:
    """The table of docs/support.md, under HEADERS."""
    return [(each.name, _cell(each.cpu), _cell(each.gpu)) for each in (*METHODS, *SETTINGS)]


def _cell(text: str) -> str:
    file, found, test = text.partition("::")
    return f"staged: {test} (`{file}`)" if found else text
