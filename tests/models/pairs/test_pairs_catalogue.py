"""Pair files: the shipped ones are sound, faulty ones are refused by field."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.models.pairs import DEFAULT_PAIR, fetch_pair, load_pair, pair_names

OWN_PAIR = """\
name = "mine"
description = "my own"
source = "shape"
method = "draft_model"

[shape.target]
hidden_size = 8
"""


def test_shipped_pairs_load_under_their_file_names() -> None:
    assert {"smollm2", "smollm2-ngram", "tiny", "tiny-ngram"} <= set(pair_names())
    assert DEFAULT_PAIR in pair_names()
    for name in pair_names():
        pair = load_pair(name)
        assert pair.name == name
        assert len(pair.description) > 10


@pytest.mark.parametrize(
    ("old", "new", "field", "wanted"),
    [
        ('method = "draft_model"', 'method = "medusa"', "method", {"value": "medusa"}),
        ('name = "mine"', 'nam = "mine"', "nam", {"value": "mine", "near": "name"}),
        ("shape.target", "shape.targt", "shape.targt", {"naming": "shape.target: is missing"}),
        ('description = "my own"', "description = 3", "description", {"value": 3}),
        ("[shape.target]", "[generated.target]", "generated.target",
         {"naming": "generated.head_dim"}),
        *(('source = "shape"', f'source = "{source}"', "the file", {"naming": f"table [{source}]"})
          for source in ("packaged", "generated")),
    ],
)  # fmt: skip
def test_faulty_pair_files_name_the_field(
    tmp_path: Path, old: str, new: str, field: str, wanted: dict[str, Any]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN_PAIR.replace(old, new))
    with refused(f"{path}: {field}", **wanted):
        load_pair(str(path))
    path.unlink()
    with refused(str(path), cause=FileNotFoundError):
        load_pair(str(path))


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", [name for name in pair_names() if load_pair(name).shape])
def test_transformers_takes_each_shape_that_ships(name: str, tmp_path: Path) -> None:
    """vLLM builds the config so when an engine starts."""
    from transformers import AutoConfig

    pair = fetch_pair(load_pair(name), tmp_path)
    for part in filter(None, (pair.target, pair.draft)):
        written = json.loads((Path(part) / "config.json").read_text())
        assert AutoConfig.from_pretrained(part).vocab_size == written["vocab_size"]


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    ("name", "family", "scaled"),
    [
        ("nemotron-h-shape", "NemotronHConfig", {"num_hidden_layers", "hybrid_override_pattern"}),
        ("kimi-linear-shape", "KimiLinearConfig", {"num_hidden_layers", "num_experts", "head_dim"}),
    ],
)
def test_sizes_of_hybrids_are_the_published_models(
    name: str, family: str, scaled: set[str]
) -> None:
    """transformers' defaults are those of Nemotron-H-8B and Kimi-Linear-48B-A3B."""
    import transformers

    source = load_pair(name).shape
    assert source is not None
    own, linear = source.target, source.target.get("linear_attn_config", {})
    default = getattr(transformers, family)()
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
             "linear_conv_kernel_dim": "short_conv_kernel_size"}  # fmt: skip
    for key, part in names.items():
        assert linear.get(part) == getattr(default, key, None)
    left = {"architectures", "dtype", "vocab_size", "max_position_embeddings", "rms_norm_eps",
            "bos_token_id", "eos_token_id", "pad_token_id", *scaled}  # fmt: skip
    compared = {k: v for k, v in own.items() if k not in left and hasattr(default, k)}
    assert {key: getattr(default, key) for key in compared} == compared
    assert len(compared) >= 15


@pytest.mark.slow
def test_the_command_lists_every_pair_and_fetches_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")

    def output(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    text = output("list", "pairs")
    assert all(name in text for name in pair_names())
    assert max(map(len, text.splitlines())) <= 80
    assert " yes " not in text  # the cache is empty
    first, second = output("list", "--fetch", "tiny"), output("list", "--fetch", "tiny")
    assert " yes " in output("list", "pairs")
    assert "tiny: generating" in first
    assert "tiny: ready" in first
    assert "tiny: already there" in second
    assert "generating" not in second
    (target,) = [line for line in second.splitlines() if line.startswith("target: ")]
    place = Path(target.removeprefix("target: "))
    assert (place / "config.json").is_file()
    assert place.is_relative_to(tmp_path)
