"""`nwor-bench plan` as a user meets it: answer first, 80 columns, files, refusals."""

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.report.text import two_digits as percent

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIGS = CHECKOUT / "tests" / "data" / "configs"
MODELS = ("Llama-3.2-3B", "Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-30B-A3B", "DeepSeek-V3")
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


@pytest.mark.parametrize("model", MODELS)
def test_the_answer_comes_first_within_80_columns(plan: Run, model: str) -> None:
    code, out, err = plan("--config", str(CONFIGS / f"{model}.json"))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert flat(out).startswith("In bytes: NWOR saves at most ")
    assert "writes become 1 to " in flat(out)
    assert "The byte model predicts these numbers" in flat(out)
    assert ("Experts:" in out) == (model in ("Qwen3-30B-A3B", "DeepSeek-V3"))


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--acceptance", "0.16"), "16 % of drafts accepted"),
        (("--acceptance", "0.5"), "0 B 0 % 50 % 1-29"),
        (("--acceptance", "0.8"), "-2.2 MB -0.030 % 50 % 1-29"),
        (("--cache-dtype", "fp8"), "33 % 1-29"),
        (("--weight-dtype", "int4"), "weights in int4"),
        (("--tensor-parallel-size", "2"), "one of 2 ranks"),
    ],
)
def test_what_the_flags_change_is_said(plan: Run, arguments: tuple[str, ...], words: str) -> None:
    _, out, _ = plan(*LLAMA, *arguments)
    assert words in flat(out)


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
    code, out, _ = plan(*hybrid)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "48 layers of gated delta net keep 151.0 MB a request in 32-bit" in flat(out)
    assert "recurrent states, read and written" in flat(out)
    assert "\nRecurrent states\n" in out
    assert "% of a step's DRAM bytes with K/V and" in flat(out)
    assert "staged: one state a request 618.2 MB 329.6 MB 947.8 MB" in flat(out)
    assert "requests that fit an H200 (139 GiB) 91 312" in flat(out)
    assert "--additional-config '{\"nwor_state_slots\": 1}'" in flat(out)
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


def test_what_is_not_built_is_said(plan: Run) -> None:
    """Mamba2's bytes are shown, but the answer promises nothing."""
    out = flat(plan("--config", str(CONFIGS / "Nemotron-H-56B.json"))[1])
    assert "staged: one state a request, not built for Mamba2" in out
    assert "nwor_state_slots" not in out
    assert "% of a step's DRAM bytes. In launches" in out


def test_other_models_have_no_recurrent_states(plan: Run) -> None:
    assert "ecurrent" not in plan(*LLAMA)[1]
    assert json.loads(plan(*LLAMA, "--json")[1])["predictions"][0]["recurrent"] is None


def test_the_nearest_measured_settings_stand_beside_the_prediction(
    plan: Run, tmp_path: Path
) -> None:
    """Settings of its own shape come first, with the numbers that the study's CSV has."""
    _, out, _ = plan(*LLAMA, "--json")
    nearest = json.loads(out)["predictions"][0]["measured"]
    with (CHECKOUT / "sweeps/studies/two-clocks/cells.csv").open() as file:
        kept = [row for row in csv.DictReader(file) if row["cell"] == "stage x adaptive"]
    first = nearest[0]
    assert (first["pair"], first["requests"], first["context"]) == ("llama-3b-shape", 8, 1024)
    of_it = [
        row
        for row in kept
        if row["pair"] == first["pair"]
        and row["cache"] == first["cache"]
        and row["requests"] == "8"
        and row["context"] == "1024"
        and "H200" in row["gpu"]
    ]
    assert first["ratio"] == float(of_it[-1]["ratio_to_off"])
    hybrid = resolve_pair("qwen3.5-27b-shape", cache_dir=tmp_path).target
    _, out, _ = plan("--config", str(hybrid), "--requests", "32", "--json")
    own, quantised = json.loads(out)["predictions"][0]["measured"][:2]
    assert (own["pair"], own["weights"], own["requests"]) == ("qwen3.5-27b-shape", "", 32)
    assert (quantised["pair"], quantised["weights"]) == ("qwen3.5-27b-shape", "fp8_per_tensor")
    quarter = resolve_pair("qwen3.5-quarter-shape", cache_dir=tmp_path).target
    _, out, _ = plan("--config", str(quarter), "--requests", "128", "--json")
    with (CHECKOUT / "sweeps/studies/states/windows.csv").open() as file:
        staged = [row for row in csv.DictReader(file) if row["cell"] == "stage x adaptive"]
    (of_four,) = (
        row for row in staged
        if (row["pair"], row["requests"], row["drafts"]) == ("qwen3.5-quarter-shape", "128", "4")
    )  # fmt: skip
    own = json.loads(out)["predictions"][0]["measured"][0]
    assert (own["pair"], own["requests"]) == ("qwen3.5-quarter-shape", 128)
    assert own["ratio"] == float(of_four["ratio_to_off"])  # not that of two drafts
    _, out, _ = plan("--config", str(CONFIGS / "DeepSeek-V3.json"), "--requests", "64", "--json")
    latent = json.loads(out)["predictions"][0]["measured"][0]
    assert (latent["pair"], latent["requests"]) == ("deepseek-lite-shape", 64)
    assert (latent["ratio"], latent["verdict"]) == (None, "as stock")
