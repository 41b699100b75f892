"""The generated pair: bytes follow the seed, noise sets the acceptance, any text tokenises."""

import json
from pathlib import Path

import numpy as np
import pytest
from file_tokenizer import FileTokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import TinyShape, generate_tiny
from nwor_bench.workload.config import load_scenario
from nwor_bench.workload.prompts import Prompt, encode, load_prompts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def weights(model: Path) -> dict[str, np.ndarray]:
    return load_file(model / "model.safetensors")


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        generate_tiny(tmp_path / name, seed=seed)
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    assert len(first) == 10  # five files for each of the two models
    other = contents(tmp_path / "other")
    assert first["target/model.safetensors"] != other["target/model.safetensors"]


def test_without_noise_the_drafter_is_the_target(tmp_path: Path) -> None:
    target, draft = generate_tiny(tmp_path, noise=0)
    assert contents(target) == contents(draft)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_noise_is_relative_to_each_matrix_and_leaves_the_target_alone(
    tmp_path: Path, noise: float
) -> None:
    plain, _ = generate_tiny(tmp_path / "plain", noise=0)
    target, draft = generate_tiny(tmp_path / "noisy", noise=noise)
    assert contents(plain) == contents(target)
    for name, weight in weights(target).items():
        change = weights(draft)[name] - weight
        if weight.ndim == 1:
            assert not change.any(), name
        else:
            used = weight != 0
            assert change[used].std() == pytest.approx(noise * weight.std(), rel=0.05), name


def test_shape_follows_the_arguments(tmp_path: Path) -> None:
    shape = TinyShape(2, hidden=64, heads=6, kv_heads=3, head_dim=16, vocab=300, max_positions=99)
    target, _ = generate_tiny(tmp_path, shape)
    config = json.loads((target / "config.json").read_text())
    loaded = weights(target)
    assert config["max_position_embeddings"] == 99
    assert loaded["model.embed_tokens.weight"].shape == (300, 64)
    assert loaded["model.layers.1.self_attn.q_proj.weight"].shape == (6 * 16, 64)
    assert loaded["model.layers.1.self_attn.k_proj.weight"].shape == (3 * 16, 64)
    assert loaded["model.layers.1.self_attn.o_proj.weight"].shape == (64, 6 * 16)
    assert "model.layers.2.input_layernorm.weight" not in loaded
    assert Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab_size() == 300


def test_special_tokens_never_win_greedily(tmp_path: Path) -> None:
    """Their logits are 0 whatever the hidden state; of 256 random ones some are above 0."""
    target, draft = generate_tiny(tmp_path, noise=0.5)
    for model in (target, draft):
        head = weights(model)["lm_head.weight"]
        assert not head[256:].any()
        assert (np.abs(head[:256]).max(axis=1) > 0).all()


@pytest.mark.parametrize(
    ("wrong", "noise", "says"),
    [({"vocab": 260}, 0.1, "vocab"), ({"heads": 3}, 0.1, "heads"), ({}, -0.1, "noise")],
)
def test_impossible_shapes_are_refused(
    tmp_path: Path, wrong: dict[str, int], noise: float, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        generate_tiny(tmp_path, TinyShape(**wrong), noise=noise)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    target, _ = generate_tiny(tmp_path_factory.mktemp("tiny"))
    return Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.mark.slow
@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_any_text_is_one_token_a_byte_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_matched_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|user|>a<|end|>").ids[::2] == [259, 256]


@pytest.mark.slow  # imports transformers
def test_the_tests_own_tokenizer_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    target, _ = generate_tiny(tmp_path)
    ours, real = FileTokenizer(target), AutoTokenizer.from_pretrained(str(target))
    prompts = [
        Prompt("a", "chat", "Why?\n\n  é <|end|> {{ x }} 'q' "),
        *load_prompts(load_scenario("mixed"))[:50],
    ]
    assert encode(prompts, ours, 10**6, 1) == encode(prompts, real, 10**6, 1)
    assert ours.chat_template == real.chat_template
    assert ours.encode("plain <|user|>") == real.encode("plain <|user|>")


PROMPTS = ["What is the capital of France?", "def add(a, b):\n    return", "once upon a time"]


def acceptance(pair: ResolvedPair) -> float:
    """Share of drafts accepted over 64 greedy tokens a prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=pair.target,
        dtype=pair.dtype,
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=False,
        speculative_config=pair.speculative_config(4),
    )
    sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    assert all(len(set(o.outputs[0].token_ids)) > 10 for o in outputs), "degenerate output"
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    assert drafted > 0
    llm.llm_engine.engine_core.shutdown()
    return counters["vllm:spec_decode_num_accepted_tokens"] / drafted


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "low", "high"), [(0.0, 0.95, 1.0), (0.05, 0.3, 0.9), (5.0, 0, 0.1)]
)
def test_noise_sets_the_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, low: float, high: float
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    target, draft = generate_tiny(tmp_path, noise=noise)
    pair = ResolvedPair("tiny", "draft_model", str(target), str(draft), "float32")
    assert low <= acceptance(pair) <= high
