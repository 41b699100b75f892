"""Files that an editor saved with a byte order mark are read; other encodings are refused."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import pytest

from nwor_bench.errors import ExitCode

Run = Callable[..., tuple[int, str, str]]

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = (CHECKOUT / "tests/data/configs/Llama-3.2-3B.json").read_text()
SWEEP = ("sweep", "--pair", "tiny", "--dry-run")
FILES = {
    "config.json": (CONFIG, ("plan", "--config", "config.json")),
    "model.json": (CONFIG, ("supports", "model.json")),
    "prompts.jsonl": (json.dumps({"text": "h\u00e9"}), (*SWEEP, "--prompts", "prompts.jsonl")),
    "points.toml": ("[axes]\npairs = ['tiny']", ("sweep", "--dry-run", "--file", "points.toml")),
    "work.toml": (
        (CHECKOUT / "scenarios/short.toml").read_text(),
        (*SWEEP, "--scenario", "work.toml"),
    ),
}

pytestmark = [pytest.mark.usefixtures("own_surroundings")]


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
    arguments = ("--model", "model", "--method", "ngram", "--dry-run")
    code, out, err = command_line("sweep", *arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert "config.json" in err
    assert "byte order mark" in err
