"""Numbers of `nwor-bench plan`, counted by hand; golden/predicted has its pages."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recipe_models import CONTENT

from nwor_bench.models.measured import AS_STOCK, MeasuredRow
from nwor_bench.models.methods import Method
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.report.plan import measured_words
from nwor_bench.report.text import two_digits as percent

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIGS = CHECKOUT / "tests" / "data" / "configs"
LLAMA = (str(CONFIGS / "Llama-3.2-3B.json"),)
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
    _, out, _ = plan("my-model", "-v")
    assert "8.03 billion" in out
    assert "'novel' is read as Llama" in flat(out)


def test_json_says_what_is_predicted(plan: Run) -> None:
    code, out, _ = plan(*LLAMA, "--acceptance", "0.25", "--json")
    assert code == 0
    told = json.loads(out)["bytes"]
    row = 28 * 2 * 8 * 128 * 2
    assert told["most_saved_share"] == pytest.approx(24 * row / told["predicted_step_bytes"])
    counted = [name for name in told if "bytes" in name]
    assert all(name.startswith("predicted_") for name in counted if name != "weight_bytes")


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
    hybrid = (str(CONFIGS / "Qwen3.5-27B.json"), "--requests", "2")
    _, out, _ = plan(*hybrid, "--json")
    told = json.loads(out)["bytes"]["recurrent"]
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
    assert told["ring_bytes_per_request"] == 16 * record
    full = 16 - 4 + 1  # rows at a commit that writes: 12 at least, 3 more each time
    read = one + 3 * columns + (full - 3) / 2 * record + 3 / full * (one + full * record)
    assert told["predicted_ring_bytes_read"] == pytest.approx(2 * read)
    written = 5 * record + 3 / full * one + 7 * columns
    assert told["predicted_ring_bytes_written"] == pytest.approx(2 * written)


def test_one_attention_layer_among_recurrent_ones_is_one_layer(plan: Run) -> None:
    config = json.loads((CONFIGS / "Qwen3.5-27B.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
    Path("config.json").write_text(json.dumps(config))
    _, out, _ = plan("config.json", "-q")
    assert "staged in the 1 attention layer, and the states of 3 recurrent layers" in flat(out)


def nearest(plan: Run, config: Path | str, requests: int) -> list[dict[str, Any]]:
    """The measured settings that stand beside a prediction, nearest first."""
    _, out, _ = plan(str(config), "--requests", str(requests), "--json")
    found: list[dict[str, Any]] = json.loads(out)["measured"]
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
    first = nearest(plan, LLAMA[0], 8)[0]
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


def test_a_model_quotes_only_measurements_of_its_kind(plan: Run) -> None:
    """DeepSeek-V3 is written as stock, as the small DeepSeek was; Mamba2's states do not stage."""
    latent = nearest(plan, CONFIGS / "DeepSeek-V3.json", 64)
    assert {row["pair"] for row in latent} == {"deepseek-lite-shape"}
    assert {(row["ratio"], row["verdict"]) for row in latent} == {(None, "as stock")}
    out = flat(plan(str(CONFIGS / "DeepSeek-V3.json"), "-q")[1])
    assert out.endswith("Nearest settings measured: written as stock, no gain.")
    assert nearest(plan, CONFIGS / "Nemotron-H-56B.json", 8) == []
    assert "No model of its kind was measured." in flat(
        plan(str(CONFIGS / "Nemotron-H-56B.json"), "-q")[1]
    )


def test_a_setting_written_as_stock_is_named_beside_timed_ones() -> None:
    timed = MeasuredRow("p", "", 8, 1024, "auto", 0.98, 0.97, 0.99, "FASTER")
    slower = replace(timed, ratio=1.02, verdict="SLOWER")
    stock = replace(timed, ratio=None, low=None, high=None, verdict=AS_STOCK)
    assert measured_words([timed, stock, slower]) == (
        "Nearest settings measured: 0.980 and 1.020 times stock's time of a window; written as "
        "stock, no gain."
    )
    alone = "Nearest settings measured: 0.980 times stock's time of a window."
    assert measured_words([timed, timed]) == alone


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 24, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
"""openai/gpt-oss-20b's: no dtype, experts in mxfp4."""


def test_gpt_oss_has_the_published_size(plan: Run, tmp_path: Path) -> None:
    """The model card says 20.9 billion parameters, and 12.8 GiB of checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    code, out, _ = plan(str(tmp_path), "--json")
    told = json.loads(out)["bytes"]
    assert (code, told["weight_dtype"], told["cache_dtype"]) == (
        0, "4.25-bit (quantised)", "bfloat16",
    )  # fmt: skip
    assert told["parameters"] == pytest.approx(20.9e9, rel=0.002)
    assert told["weight_bytes"] / 2**30 == pytest.approx(12.8, abs=0.05)


@pytest.mark.parametrize(
    ("model", "needed"),
    [("Llama-3.2-3B", {"l4": 1, "h100": 1}), ("Llama-3.1-70B", {"l4": 8, "h100": 2, "h200": 2}),
     ("DeepSeek-V3", {"h100": 16, "h200": 8})],
)  # fmt: skip
def test_gpus_that_a_model_needs(plan: Run, model: str, needed: dict[str, int]) -> None:
    """DeepSeek-V3 runs on eight H200 or sixteen H100, as its vLLM recipe says."""
    gpus = json.loads(plan(str(CONFIGS / f"{model}.json"), "--json")[1])["gpus"]
    found = {each["gpu"]: each["gpus_needed"] for each in gpus}
    assert found.items() >= needed.items()
    memory = 79 * 2**30 * 0.92
    if model == "Llama-3.2-3B":
        (one,) = [each for each in gpus if each["gpu"] == "h100"]
        request = 1040 * 28 * 2 * 8 * 128 * 2  # 1,024 + 4 + 1 tokens in blocks of 16
        weights = (28 * (2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192) + 128256 * 3072) * 2
        assert one["requests_that_fit"] == (memory - weights) // request
        step = json.loads(plan(*LLAMA, "--json")[1])["bytes"]["predicted_step_bytes"]
        assert one["predicted_step_ms"] == pytest.approx(step / 3.35e12 * 1e3)


def test_a_pair_is_planned_by_name_or_file_as_its_config(plan: Run, tmp_path: Path) -> None:
    """The pair's target decides; a folder of that name comes first, and a pair may be unbuilt."""
    file = CHECKOUT / "scenarios/pairs/qwen-shape.toml"
    folder = Path(resolve_pair("qwen-shape", cache_dir=tmp_path).target)
    told = [json.loads(plan(str(each), "--json")[1]) for each in ("qwen-shape", file, folder)]
    assert told[0] == told[1]
    assert told[0]["bytes"] == told[2]["bytes"]
    shutil.copytree(CONFIGS, "qwen-shape")
    shutil.move("qwen-shape/Llama-3.2-3B.json", "qwen-shape/config.json")
    assert json.loads(plan("qwen-shape", "--json")[1])["bytes"]["parameters"] > 3.2e9


def test_a_device_is_one_row_and_its_own_attention(plan: Run) -> None:
    for written in ("RTX 4090", "rtx-4090", "NVIDIA rtx4090"):
        told = json.loads(plan("gpt-oss-20b-shape", "--device", written, "--json")[1])
        assert [each["gpu"] for each in told["gpus"]] == ["rtx4090"]
        assert told["support"]["backends"] == ["TRITON_ATTN"]  # sinks
    told = json.loads(plan(*LLAMA, "--device", "cpu", "--json")[1])
    assert (told["gpus"], told["measured"], told["support"]["runner"]) == ([], [], "V1")


def test_what_the_byte_model_does_not_cover_has_an_answer(plan: Run, tmp_path: Path) -> None:
    """A missing entry, or weights of unknown size: layers are told all the same."""
    config = json.loads(Path(LLAMA[0]).read_text())
    odd = {**config, "quantization_config": {"quant_method": "odd"}}
    for content, why in (
        ({**config, "intermediate_size": None}, 'its config has no "intermediate_size"'),
        (odd, "how many bits a weight has; write one of --weight-dtype"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        code, out, _ = plan(str(tmp_path))
        assert code == 0
        assert "drafts would be staged, in all 28 layers." in flat(out)
        assert "Bytes and memory are not predicted" in flat(out)
        assert why in flat(out)


def test_every_recipe_model_has_an_answer(plan: Run) -> None:
    for entry in CONTENT["models"]:
        Path("config.json").write_text(json.dumps(entry["config"]))
        code, out, err = plan("config.json", "--json")
        assert (code, err) == (0, "")
        methods = json.loads(out)["support"]["methods"]
        assert {each["method"] for each in methods} == set(Method)


def test_a_checkpoint_with_an_fp8_cache_is_one_without_a_flag(plan: Run, tmp_path: Path) -> None:
    """vLLM takes `auto` so; a flag stands above it."""
    quantised = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = json.loads(Path(LLAMA[0]).read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    on_cpu = ("config.json", "--device", "cpu")
    assert "cannot read such a cache (fp8)" in plan(*on_cpu, "-q")[1]
    assert "cache_dtype" not in plan(*on_cpu, "-q", "--cache-dtype", "bfloat16")[1]
    assert "8-bit (quantised), cache in fp8" in flat(plan("config.json")[1])
    assert "cache in bfloat16" in flat(plan("config.json", "--cache-dtype", "bfloat16")[1])


def test_one_slot_is_not_built_for_longer_windows_than_a_ring(plan: Run) -> None:
    for drafts, fits in (("15", True), ("16", False)):
        hybrid = (str(CONFIGS / "Qwen3.5-27B.json"), "--draft-tokens", drafts, "--requests", "2")
        gpus = json.loads(plan(*hybrid, "--json")[1])["gpus"]
        assert {gpu["requests_with_one_slot"] is not None for gpu in gpus} == {fits}
        text = flat(plan(*hybrid, "-v")[1])
        assert ("with one" in text) == fits
        assert ("One slot is not built for windows of 17 tokens." in text) != fits
