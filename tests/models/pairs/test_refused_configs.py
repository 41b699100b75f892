"""A config.json that transformers or vLLM refuses: one message with its file, nothing started."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nwor_bench.errors import ExitCode
from nwor_bench.models.pairs import ResolvedPair, check_model_configs, resolve_pair

pytestmark = [
    pytest.mark.slow,  # transformers is imported
    pytest.mark.usefixtures("own_surroundings"),
]

Run = Callable[..., tuple[int, str, str]]
MISSING = object()
SIZES = ("--requests", "2", "--batches", "2", "--max-new-tokens", "6", "--output", "run")


@pytest.fixture
def tiny(own_surroundings: None) -> ResolvedPair:
    return resolve_pair("tiny")


@pytest.fixture(autouse=True)
def _no_engine(run_with: Callable[..., None]) -> None:
    def start(*arguments: Any) -> Any:
        raise AssertionError("an engine was started")

    run_with(engine_factory=start)


def changed(model: str, **changes: Any) -> Path:
    """A copy of a model's folder with another config.json."""
    folder = Path("changed").absolute()
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def sweep_with(
    command_line: Run, tiny: ResolvedPair, role: str, changes: dict[str, Any]
) -> tuple[Path, str]:
    """The changed model's folder, and the refusal of a sweep with it; nothing was started."""
    models = {"target": tiny.target, "draft": str(tiny.draft)}
    folder = changed(models[role], **changes)
    models[role] = str(folder)
    flags = ("--model", models["target"], "--draft-model", models["draft"])
    code, _, error = command_line("sweep", *flags, *SIZES)
    assert code == ExitCode.BAD_USAGE
    assert not Path("run").exists()
    return folder, error


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 129}, r"transformers refuses it \(.*129.* not a multiple of .* heads"),
        ({"hidden_size": "many"}, "transformers refuses it .*hidden_size.* expected int"),
        ({"num_attention_heads": 0}, "transformers refuses it .*zero"),
        ({"num_attention_heads": None}, "transformers refuses it .*num_attention_heads"),
        ({"num_hidden_layers": "3"}, "transformers refuses it .*num_hidden_layers"),
        ({"vocab_size": [1]}, "transformers refuses it .*vocab_size"),
        ({"dtype": "float31"}, "its \"dtype\" is 'float31'; write"),
        ({"hidden_size": MISSING}, 'it has no "hidden_size"; add it'),
        ({"num_hidden_layers": MISSING}, 'it has no "num_hidden_layers"; add it'),
    ],
)
def test_what_transformers_refuses_is_one_message_with_the_file(
    command_line: Run, tiny: ResolvedPair, role: str, changes: dict[str, Any], words: str
) -> None:
    folder, error = sweep_with(command_line, tiny, role, changes)
    message = " ".join(error.splitlines()[-1:])
    assert message.startswith("nwor-bench: pair ")
    assert f"{folder}/config.json" in message
    assert re.search(words, message)


def test_a_shape_that_transformers_refuses_names_its_pair(command_line: Run) -> None:
    """A pair of one's own, whose config.json is written into the cache."""
    Path("odd.toml").write_text(
        'name = "odd"\ndescription = "hidden size no multiple of the heads"\nsource = "shape"\n'
        'method = "ngram"\ndtype = "float32"\n[shape.target]\n'
        'architectures = ["LlamaForCausalLM"]\nmodel_type = "llama"\nhidden_size = 130\n'
        "intermediate_size = 256\nnum_hidden_layers = 2\nnum_attention_heads = 4\n"
        "num_key_value_heads = 2\nvocab_size = 512\nmax_position_embeddings = 2048\n"
    )
    code, _, error = command_line("sweep", "--pair", "odd.toml", *SIZES)
    assert code == ExitCode.BAD_USAGE
    assert "nwor-bench: pair odd: target: " in error
    assert "config.json" in error
    assert "(130) is not a multiple of the number of attention heads (4)" in error


def test_sound_configs_and_types_of_vllms_own_pass(tiny: ResolvedPair) -> None:
    check_model_configs(tiny)
    folder = changed(tiny.target, model_type="a_type_that_only_vllm_knows", hidden_size=MISSING)
    check_model_configs(ResolvedPair("own", "ngram", str(folder), None, "float32"))
    check_model_configs(ResolvedPair("hub", "ngram", "org/name", None, "float32"))


@pytest.mark.engine
@pytest.mark.parametrize("role", ["target", pytest.param("draft", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such_type"}, "model type `no_such_type`"),
        ({"model_type": MISSING}, "Should have a `model_type` key"),
    ],
)
def test_what_vllm_cannot_read_is_one_message_with_the_file(
    command_line: Run,
    tiny: ResolvedPair,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "0" if "LOGGING" in name else "off")
    folder, error = sweep_with(command_line, tiny, role, changes)
    assert f"'{folder}/config.json' is invalid; vLLM refuses it" in error
    assert words in error
