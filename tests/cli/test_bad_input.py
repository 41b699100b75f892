"""Bad input: one clear message, exit code 2, before an engine starts or a folder is made."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from nwor_bench.cli import app
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import ConfigError, ExitCode

Refusal = Callable[..., str]
Run = Callable[..., tuple[int, str, str]]
CHECKOUT = Path(__file__).resolve().parents[2]
SWEEP = ("sweep", "--pair", "tiny", "--output", "out/run")

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, run_with: Callable[..., None]) -> None:
    """Fail if a sweep gets as far as vLLM."""

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the sweep went on to vLLM")

    monkeypatch.setattr(VllmEngine, "__init__", refuse)
    run_with(check_engine=refuse)


@pytest.fixture
def refusal(no_engine: None, command_line: Run) -> Refusal:
    """Run `nwor-bench` and return its message, once code, shape and traces are checked."""

    def invoke(*arguments: str) -> str:
        before = sorted(Path.cwd().rglob("*"))
        code, _, message = command_line(*arguments)
        assert code == ExitCode.BAD_USAGE, message
        assert sorted(Path.cwd().rglob("*")) == before, "it left something behind"
        assert message.startswith(("nwor-bench: ", "Usage: "))
        assert 1 <= len(message.splitlines()) <= 6
        assert "Traceback" not in message
        return message

    return invoke


@pytest.fixture
def refuses(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run `nwor-bench` and compare the error that it printed, as `refused` does."""
    main, printed = app.main, []

    def main_with_its_error() -> None:
        try:
            main()
        except SystemExit as ended:
            printed.append(ended.__context__)
            raise

    def check(arguments: Sequence[str], field: str, **wanted: Any) -> None:
        message = refusal(*arguments)
        with refused(field, wanted.pop("kind", ConfigError), **wanted):
            raise printed[-1]
        assert message == f"nwor-bench: {printed[-1]}\n"

    monkeypatch.setattr(app, "main", main_with_its_error)
    return check


@pytest.fixture
def sweep_refuses(refuses: Callable[..., None]) -> Callable[..., None]:
    """Compare the error of a sweep of the tiny pair with these further arguments."""
    return lambda arguments, field, **wanted: refuses([*SWEEP, *arguments], field, **wanted)


@pytest.fixture
def sweep(refusal: Refusal) -> Refusal:
    """The refusal of a sweep of the tiny pair with these further arguments."""
    return lambda *arguments: refusal(*SWEEP, *arguments)


# --- names ---


def test_the_messages_of_flags_name_flag_value_and_remedy(sweep: Refusal) -> None:
    assert sweep("--dtype", "bf16") == (
        "nwor-bench: --dtype: unknown name 'bf16'; did you mean 'bfloat16'? known: auto, bfloat16, "
        "float16, float32\n"
    )
    assert sweep("--draft-tokens", "0") == (
        "nwor-bench: --draft-tokens: 0 is invalid; write 1 or more\n"
    )
    assert sweep("--nwor-modes", "off,off") == (
        "nwor-bench: --nwor-modes: 'off,off' is invalid; write each mode once\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweeep"], "sweep"),
        (["pairs", "lst"], "list"),
        (["sweep", "--request", "4"], "--requests"),
        (["report"], "run"),
    ],
)
def test_unknown_names_elsewhere(refusal: Refusal, arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


# --- memory and lengths ---


@pytest.mark.slow
def test_no_memory_for_the_cache(sweep: Refusal) -> None:
    message = sweep("--engine-args", '{"kv_cache_memory_bytes": 1000000000000000}')
    assert re.search(
        r"kv_cache_memory_bytes: '1000000000000000' is invalid; no free memory.* GiB needed.* "
        r"GiB free; write",
        message,
    )


# --- models ---


def test_a_pair_and_a_target_contradict(sweep: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give one of the two" in sweep("--target-model", "org/name")
    monkeypatch.setenv("TARGET_MODEL", "org/name")
    assert "TARGET_MODEL" in sweep()


def test_models_from_the_environment(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARGET_MODEL", "/no/such/target")
    assert "'/no/such/target' is invalid; no such folder" in refusal("sweep")
    monkeypatch.delenv("TARGET_MODEL")
    monkeypatch.setenv("DRAFT_MODEL", "/no/such/draft")
    assert "'/no/such/draft' is invalid; no such folder" in refusal("sweep", "--pair", "tiny")


@pytest.mark.slow
def test_empty_variables_are_no_models(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, command_line: Run
) -> None:
    monkeypatch.setenv("TARGET_MODEL", "")
    monkeypatch.setenv("DRAFT_MODEL", "")
    code, out, _ = command_line("sweep", "--pair", "tiny", "--dry-run")
    assert code == 0
    assert "pair tiny: draft_model" in out


def test_a_speculative_config_chooses_the_method(sweep_refuses: Callable[..., None]) -> None:
    arguments = ["--speculative-config", '{"method": "eagel"}']
    sweep_refuses(arguments, "method", value="eagel", near="eagle")


# --- prompts ---


def test_prompts_longer_than_the_model_takes(sweep_refuses: Callable[..., None]) -> None:
    sweep_refuses(["--max-model-len", "60"], "--max-model-len", value=60)


def test_a_file_without_prompts(sweep_refuses: Callable[..., None]) -> None:
    Path("mine.jsonl").touch()
    sweep_refuses(["--prompts", "mine.jsonl"], "--prompts", value="mine.jsonl", naming="empty")


# --- output ---


def test_what_is_wrong_with_the_output_is_said_first(refuses: Callable[..., None]) -> None:
    """Before a pair is downloaded."""
    Path("old").mkdir()
    (Path("old") / "run.json").write_text("{}")
    refuses(["sweep", "--pair", "no-such-pair", "--output", "old"], "--output", value="old")


# --- reports ---


def test_reports_of_what_is_no_run(refusal: Refusal) -> None:
    Path("empty").mkdir()
    Path("file").write_text("x")
    for name in ("empty", "file", "missing"):
        assert "name a folder that holds a run.json" in refusal("report", name)


# --- vLLM's own refusals ---


@pytest.mark.engine
def test_what_vllm_refuses_is_refused_before_a_folder_is_made(
    sweep: Refusal, monkeypatch: pytest.MonkeyPatch, run_with: Callable[..., None]
) -> None:
    from nwor_bench.engine.engine import check_arguments

    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "0" if "LOGGING" in name else "off")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    run_with(check_engine=check_arguments)
    message = sweep("--engine-args", '{"quantization": "nope"}')
    assert message.startswith("nwor-bench: vLLM refuses this configuration: ")
    assert "Unknown quantization method: nope" in message
    assert "input_value" not in message


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("plan --config ~nobody-here/x", "--config"),
        ("supports ~nobody-here/x", "CONFIG_OR_MODEL"),
        ("plan --config tiny --requests 1" + "0" * 400, "--requests"),
        ('sweep --engine-args {"block_size":0}', "--engine-args: block_size"),
        (
            'sweep --engine-args {"kv_cache_memory_bytes":true}',
            "--engine-args: kv_cache_memory_bytes",
        ),
        ("live http://\u2713", "URL"),
        ("live http://" + "a" * 300, "URL"),
        ("sweep --pair tiny --prompts half.jsonl", "half.jsonl:1: text"),
        ("plan --config kimi.json", "--config"),
    ],
)
def test_values_at_which_a_library_fails_are_refused_before_it(
    refuses: Callable[..., None], arguments: str, field: str
) -> None:
    Path("half.jsonl").write_text('{"text": "\\ud800"}\n')
    config = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    config["linear_attn_config"] = {"full_attn_layers": 3}
    Path("kimi.json").write_text(json.dumps(config))
    refuses(arguments.split(), field)


@pytest.mark.parametrize(
    "arguments", ["plan --config", "supports", "report", "compare", "sweep --pair tiny --resume"]
)
def test_a_name_that_is_too_long(refusal: Refusal, arguments: str) -> None:
    name = "a" * 300
    both = [name] * (2 if arguments == "compare" else 1)
    assert refusal(*arguments.split(), *both).startswith(f"nwor-bench: path: '{name}")


# --- encodings ---


CONFIG = (CHECKOUT / "tests/data/configs/Llama-3.2-3B.json").read_text()
DRY_RUN = ("sweep", "--pair", "tiny", "--dry-run")
FILES = {
    "config.json": (CONFIG, ("plan", "--config", "config.json")),
    "model.json": (CONFIG, ("supports", "model.json")),
    "prompts.jsonl": (json.dumps({"text": "h\u00e9"}), (*DRY_RUN, "--prompts", "prompts.jsonl")),
    "points.toml": ("[axes]\npairs = ['tiny']", ("sweep", "--dry-run", "--file", "points.toml")),
    "work.toml": (
        (CHECKOUT / "scenarios/short.toml").read_text(),
        (*DRY_RUN, "--scenario", "work.toml"),
    ),
}


@pytest.mark.slow  # commands that import much
@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_is_left_out(command_line: Run, name: str) -> None:
    text, arguments = FILES[name]
    Path(name).write_bytes(BOM_UTF8 + text.encode())
    code, out, err = command_line(*arguments)
    assert (code, err) == (ExitCode.OK, "")
    assert out


@pytest.mark.parametrize("name", FILES)
def test_another_encoding_is_refused_with_the_file_and_a_remedy(
    command_line: Run, name: str
) -> None:
    text, arguments = FILES[name]
    Path(name).write_bytes(text.encode("utf-16"))
    code, out, err = command_line(*arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert name in err
    assert "save it as UTF-8" in err


def test_a_model_folder_with_a_byte_order_mark_would_fail_in_transformers(
    command_line: Run,
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_bytes(BOM_UTF8 + CONFIG.encode())
    Path("model/tokenizer.json").touch()
    arguments = ("--model", "model", "--method", "ngram", "--dry-run")
    code, out, err = command_line("sweep", *arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert "config.json" in err
    assert "byte order mark" in err
