"""Refusals beside the table of golden/refusals: prompts, encodings, vLLM's own words, imports."""

import json
import os
import re
import subprocess
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.workload.config import load_scenario, resolve

pytestmark = pytest.mark.usefixtures("own_surroundings")


Refusal = Callable[..., str]

Run = Callable[..., tuple[int, str, str]]

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refusal(
    command_line: Run, run_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Refusal:
    """Run `nwor-bench` as far as vLLM and return what it says; nothing is left behind."""

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the sweep went on to vLLM")

    monkeypatch.setattr(VllmEngine, "__init__", refuse)
    run_with(check_engine=refuse)

    def invoke(*arguments: str) -> str:
        before = sorted(Path.cwd().rglob("*"))
        code, _, message = command_line(*arguments)
        assert code == ExitCode.BAD_USAGE, message
        assert sorted(Path.cwd().rglob("*")) == before, "it left something behind"
        return message

    return invoke


@pytest.mark.slow
def test_no_memory_for_the_cache(refusal: Refusal) -> None:
    huge = '{"kv_cache_memory_bytes": 1000000000000000}'
    assert re.search(
        r"kv_cache_memory_bytes: '1000000000000000' is invalid; no free memory.* GiB needed.* "
        r"GiB free; write",
        refusal("sweep", "--pair", "tiny", "--engine-args", huge),
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-model-len 60", "nwor-bench: --max-model-len: 60 is invalid; prompt '"),
        ("--prompts mine.jsonl", "nwor-bench: --prompts: 'mine.jsonl' is invalid; it is empty"),
        ("--prompts half.jsonl", "nwor-bench: half.jsonl:1: text"),
    ],
)
def test_prompts_are_refused_before_an_engine_starts(
    refusal: Refusal, flags: str, words: str
) -> None:
    Path("mine.jsonl").touch()
    Path("half.jsonl").write_text('{"text": "\\ud800"}\n')
    assert refusal("sweep", "--pair", "tiny", *flags.split()).startswith(words)


@pytest.mark.slow
def test_empty_variables_are_no_models(monkeypatch: pytest.MonkeyPatch, command_line: Run) -> None:
    monkeypatch.setenv("TARGET_MODEL", "")
    monkeypatch.setenv("DRAFT_MODEL", "")
    code, out, _ = command_line("sweep", "--pair", "tiny", "--dry-run")
    assert code == 0
    assert "pair tiny: draft_model" in out


@pytest.mark.engine
def test_what_vllm_refuses_is_refused_before_a_folder_is_made(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, run_with: Callable[..., None]
) -> None:
    from nwor_bench.engine.engine import check_arguments

    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "0" if "LOGGING" in name else "off")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    run_with(check_engine=check_arguments)
    message = refusal("sweep", "--pair", "tiny", "--engine-args", '{"quantization": "nope"}')
    assert message.startswith("nwor-bench: vLLM refuses this configuration: ")
    assert "Unknown quantization method: nope" in message
    assert "input_value" not in message


@pytest.mark.parametrize("arguments", ["plan", "report", "compare", "sweep --pair tiny --resume"])
def test_a_name_that_is_too_long(refusal: Refusal, arguments: str) -> None:
    name = "a" * 300
    both = [name] * (2 if arguments == "compare" else 1)
    assert refusal(*arguments.split(), *both).startswith(f"nwor-bench: path: '{name}")


def test_json_that_is_nested_too_deeply(refusal: Refusal) -> None:
    Path("deep.json").write_text("[" * 10**5)
    assert "as JSON" in refusal("plan", "deep.json")
    with pytest.raises(ConfigError, match=r"--engine-args: .*not JSON"):
        resolve(load_scenario("short"), engine_args="[" * 10**5)


def test_vllms_own_schedule_of_draft_counts_is_refused() -> None:
    by_size = "num_speculative_tokens_per_batch_size"
    given = {"draft_counts": [0, 4], "nwor_modes": "off", "scv_modes": "off"}
    with refused(f"--speculative-config: {by_size}", value=True):
        resolve(load_scenario("short"), **given, speculative_config={by_size: []})


CONFIG = (CHECKOUT / "tests/data/configs/Llama-3.2-3B.json").read_text()

DRY_RUN = ("sweep", "--pair", "tiny", "--dry-run")

FILES = {
    "config.json": (CONFIG, ("plan", "config.json")),
    "prompts.jsonl": (json.dumps({"text": "h\u00e9"}), (*DRY_RUN, "--prompts", "prompts.jsonl")),
    "points.toml": ("[axes]\npairs = ['tiny']", ("sweep", "--dry-run", "--file", "points.toml")),
    "work.toml": (
        (CHECKOUT / "scenarios/short.toml").read_text(),
        (*DRY_RUN, "--scenario", "work.toml"),
    ),
}


@pytest.mark.slow  # commands that import much
@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_is_left_out_and_another_encoding_refused(
    command_line: Run, name: str
) -> None:
    text, arguments = FILES[name]
    Path(name).write_bytes(BOM_UTF8 + text.encode())
    code, out, err = command_line(*arguments)
    assert (code, bool(out), err) == (ExitCode.OK, True, "")
    Path(name).write_bytes(text.encode("utf-16"))
    code, out, err = command_line(*arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert name in err
    assert "save it as UTF-8" in err


def test_a_model_folder_with_a_byte_order_mark_would_fail_in_transformers(refusal: Refusal) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_bytes(BOM_UTF8 + CONFIG.encode())
    Path("model/tokenizer.json").touch()
    message = refusal("sweep", "--model", "model", "--method", "ngram", "--dry-run")
    assert "config.json" in message
    assert "byte order mark" in message


HUB = ("sweep --target-model no/such", "plan no/such")

SCRIPT = f"""
import sys
import refused_commands as table
table.answered((table.GOLDEN / "refusals" / "early.txt").read_text())
for line in {HUB!r}:
    assert "127.0.0.1:9 cannot be reached" in table.refusal_of(line), line
heavy = ("torch", "vllm", "transformers", "pandas", "scipy", "plotly")
assert not [name for name in heavy if name in sys.modules]
sys.argv = ["nwor-bench", "sweep", "--pair", "tiny", "--dry-run"]
try:
    table.cli.main()
except SystemExit as end:
    assert end.code == 0
assert "transformers" in sys.modules
assert not {{"torch", "vllm"}} & sys.modules.keys()
"""


@pytest.mark.slow  # a process
def test_refusals_import_nothing_heavy_and_a_dry_run_not_torch(
    tmp_path: Path, pair_cache: Path
) -> None:
    paths = (CHECKOUT, CHECKOUT / "kernels", CHECKOUT / "tests")
    environ = {
        **os.environ, "PYTHONPATH": ":".join(map(str, paths)), "NWOR_BENCH_CACHE": str(pair_cache),
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
