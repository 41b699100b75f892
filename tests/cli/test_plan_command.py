"""Numbers of `nwor-bench plan`, counted by hand; golden/predicted has its pages."""

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.report.text import two_digits as percent

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIGS = CHECKOUT / "tests" / "data" / "configs"
LLAMA = ("--config", str(CONFIGS / "Llama-3.2-3B.json"))
SHARE = re.compile(r"saves at most ([\d.]+) %")

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.fixture
def plan(command_line: Run) -> Run:
    """Run `nwor-bench plan` in this process: exit code, stdout, stderr."""
    return partial(command_line, "plan")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_share_of_the_3b_shape_is_the_one_counted_by_hand(plan: Run) -> None:
    _, out, _ = plan(*LLAMA, "--acceptance", "0")
    drafts = 8 * 4 * 28 * 2 * 8 * 128 * 2
    context = 8 * 1024 * 28 * 2 * 8 * 128 * 2
    attention = 3072 * 3072 * 2 + 3072 * 1024 * 2
    weights = (28 * (attention + 3 * 3072 * 8192) + 128256 * 3072) * 2
    expected = 100 * drafts / (weights + context + drafts)
    found = SHARE.search(flat(out))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(expected, rel=0.02)


def test_a_folder_of_an_unknown_model_type(plan: Run) -> None:
    config = json.loads((CONFIGS / "Llama-3.1-8B.json").read_text())
    Path("my-model").mkdir()
    Path("my-model/config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    _, out, _ = plan("--config", "my-model")
    assert "my-model: 8.03 billion" in out
    assert "'novel' is read as Llama" in flat(out)


def test_json_has_each_strategy_and_says_predicted(plan: Run) -> None:
    code, out, _ = plan(*LLAMA, "--acceptance", "0.25", "--json")
    assert code == 0
    rows = json.loads(out)["predictions"][0]["strategies"]
    assert [r["strategy"] for r in rows] == ["direct", "copy_spilled", "copy_in_l2", "reference"]
    row = 28 * 2 * 8 * 128 * 2
    total = [r["predicted_bytes_read"] + r["predicted_bytes_written"] for r in rows]
    assert total == [32 * row, 48 * row, 8 * row, 16 * row]
    limits = [r["predicted_break_even_acceptance"] for r in rows]
    assert [limit is None for limit in limits] == [True, True, False, False]
    counted = [name for name in rows[0] if "bytes" in name or "share" in name]
    assert all(name.startswith("predicted_") for name in counted)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"), (1e-15, "0 %"), (0.0000023, "0.00023 %"), (0.00025, "0.025 %"),
        (-0.0014940, "-0.15 %"), (0.123, "12 %"), (1, "100 %"), (0.05, "5.0 %"),
    ],
)  # fmt: skip
def test_percentages_have_two_digits_and_no_exponent(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_hybrids_recurrent_states_are_predicted(plan: Run) -> None:
    """Qwen3.5-27B: 48 layers x 48 heads x 128 x 128 in float32, five of them a window of 4."""
    hybrid = ("--config", str(CONFIGS / "Qwen3.5-27B.json"), "--requests", "2")
    _, out, _ = plan(*hybrid, "--json")
    told = json.loads(out)["predictions"][0]["recurrent"]
    one = 48 * 48 * 128 * 128 * 4
    assert told["state_bytes_per_request"] == one
    columns = 48 * 10240 * 2
    assert told["predicted_bytes_read"] == 2 * (one + 3 * columns)
    assert told["predicted_bytes_written"] == 2 * (5 * one + 7 * columns)
    record = 48 * (48 * 128 * 4 + 16 * 128 * 2 + 48 * 4)  # half of four drafts is accepted
    assert told["predicted_staged_bytes_read"] == 2 * (2 * one + 3 * columns + 3 * record)
    assert told["predicted_staged_bytes_written"] == 2 * (one + 7 * columns + 5 * record)
    rows = 2 * 5 * 16 * 2 * 4 * 256 * 2
    share = told["predicted_bytes_written"] / (told["predicted_bytes_written"] + rows)
    assert told["predicted_share_of_writes"] == pytest.approx(share)
    assert told["reserved_bytes_per_request"] == 5 * told["one_slot_bytes_per_request"]


def nearest(plan: Run, config: Path | str, requests: int) -> list[dict[str, Any]]:
    """The measured settings that stand beside a prediction, nearest first."""
    _, out, _ = plan("--config", str(config), "--requests", str(requests), "--json")
    found: list[dict[str, Any]] = json.loads(out)["predictions"][0]["measured"]
    return found


def ratio_in(study: str, cell: str, **wanted: str) -> float:
    """The last ratio that a study's CSV has for these values; `gpu` may be a part of its name."""
    gpu = wanted.pop("gpu", "")
    with (CHECKOUT / "sweeps/studies" / study).open() as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] == cell]
    found = [r for r in rows if wanted.items() <= r.items() and gpu in r.get("gpu", "")]
    return float(found[-1]["ratio_to_off"])


def test_the_nearest_measured_settings_stand_beside_the_prediction(
    plan: Run, tmp_path: Path
) -> None:
    """Settings of its own shape come first, with the numbers that the study's CSV has."""
    first = nearest(plan, LLAMA[1], 8)[0]
    assert (first["pair"], first["requests"], first["context"]) == ("llama-3b-shape", 8, 1024)
    place = {"pair": first["pair"], "cache": first["cache"], "requests": "8", "context": "1024"}
    study = "two-clocks/cells.csv"
    assert first["ratio"] == ratio_in(study, "stage x adaptive", **place, gpu="H200")
    hybrid = resolve_pair("qwen3.5-27b-shape", cache_dir=tmp_path).target
    own, quantised = nearest(plan, hybrid, 32)[:2]
    assert (own["pair"], own["weights"], own["requests"]) == ("qwen3.5-27b-shape", "", 32)
    assert (quantised["pair"], quantised["weights"]) == ("qwen3.5-27b-shape", "fp8_per_tensor")
    quarter = resolve_pair("qwen3.5-quarter-shape", cache_dir=tmp_path).target
    own = nearest(plan, quarter, 128)[0]
    place = {"pair": "qwen3.5-quarter-shape", "requests": "128", "drafts": "4"}  # not those of two
    assert own["ratio"] == ratio_in("states/windows.csv", "stage x adaptive", **place)
    latent = nearest(plan, CONFIGS / "DeepSeek-V3.json", 64)[0]
    assert (latent["pair"], latent["requests"]) == ("deepseek-lite-shape", 64)
    assert (latent["ratio"], latent["verdict"]) == (None, "as stock")
