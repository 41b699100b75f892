"""Loading, choosing and encoding prompts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.workload import prompts as module
from nwor_bench.workload.config import PromptSource, Scenario
from nwor_bench.workload.prompts import PLACEHOLDER, Prompt, encode, load_prompts, read_jsonl
from nwor_bench.workload.schedule import select_blocks


def scenario_with(**source: Any) -> Scenario:
    return Scenario(
        name="s",
        requests=1,
        batches=1,
        draft_tokens=1,
        max_new_tokens=2,
        max_model_len=8,
        prompts=PromptSource(**source),
    )


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- loading ---


def test_users_jsonl(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        '{"text": "one\\u2028two"}',
        "",
        '{"prompt": "three", "id": "x", "category": "c", "more": 1}',
    )
    assert load_prompts(scenario_with(path=path)) == [
        Prompt("line-1", "user", "one\u2028two"),
        Prompt("x", "c", "three"),
    ]


def test_a_jsonl_as_nvidias_script_prepares_it(tmp_path: Path) -> None:
    """SPEED-Bench's rows with `messages` for `turns`; other benchmarks' rows have `turns`."""
    turns = ["Name a prime.", "And another?"]
    row = {"question_id": "q1", "category": "math", "source": "made up", "multiturn": True}
    messages = [{"role": "user", "content": turn} for turn in turns]
    system = {"role": "system", "content": "Be brief."}
    path = write_lines(
        tmp_path,
        json.dumps(row | {"messages": messages}),
        json.dumps(row | {"messages": [system, *messages], "id": "b"}),
        json.dumps(row | {"turns": turns, "question_id": 7}),
    )
    prompts = load_prompts(scenario_with(path=path))
    assert prompts == [Prompt(id, "math", "Name a prime.") for id in ("line-1", "b", "line-3")]


@pytest.mark.parametrize(
    ("line", "key", "wanted"),
    [
        ("{not json}", "", {"cause": ValueError}),
        pytest.param("[" * 100_000, "", {"cause": ValueError}, id="nested too deeply"),
        ('"text"', "", {"cause": None}),
        ('{"txt": "a"}', "", {"cause": None}),
        ('{"text": "a", "prompt": "b"}', "", {"cause": None}),
        ('{"text": 5}', ": text", {"value": 5}),
        ('{"text": "  "}', ": text", {"value": "  "}),
        ('{"text": "a", "turns": ["b"]}', "", {"cause": None}),
        ('{"turns": []}', ": turns", {"value": []}),
        ('{"turns": [5]}', ": turns", {"value": [5]}),
        ('{"messages": [{"role": "user"}]}', ": messages", {"cause": None}),
        (json.dumps({"turns": [f"{PLACEHOLDER}\n\nSum up {{article}}"]}), ": turns", {}),
        ('{"text": "a", "id": 7}', ": id", {"value": 7}),
        ('{"text": "a", "id": "first"}', ": id", {"value": "first"}),
    ],
)
def test_a_faulty_line_is_named(
    tmp_path: Path, line: str, key: str, wanted: dict[str, Any]
) -> None:
    path = write_lines(tmp_path, '{"text": "fine", "id": "first"}', "", line)
    with refused(f"{path}:3{key}", **wanted):
        read_jsonl(path)


def test_unreadable_jsonl(tmp_path: Path) -> None:
    with refused("none.jsonl", cause=FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    with refused("latin.jsonl", cause=ValueError):
        read_jsonl(tmp_path / "latin.jsonl")


def test_lengths_and_categories_filter(tmp_path: Path) -> None:
    rows = [
        {"text": "a" * size, "id": f"{category}{size}", "category": category}
        for category in "xy"
        for size in (1, 5, 9)
    ]
    path = write_lines(tmp_path, *map(json.dumps, rows))
    kept = load_prompts(scenario_with(path=path, categories=("y",), min_chars=5, max_chars=9))
    assert [prompt.id for prompt in kept] == ["y5", "y9"]
    with refused("scenario 's'", naming="6 prompts has 10 to any number of"):
        load_prompts(scenario_with(path=path, min_chars=10))


def test_unknown_builtin_category() -> None:
    with refused("prompts.categories", value="math", near="maths"):
        load_prompts(scenario_with(categories=("math",)))


# --- choosing ---

pools = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1).map(
    lambda sizes: [
        Prompt(f"{category}{i}", category, "text")
        for category, size in sizes.items()
        for i in range(size)
    ]
)


@given(pools, st.integers(1, 30), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_a_block_is_deterministic_complete_and_without_needless_repeats(
    pool: list[Prompt], requests: int, block: int, seed: int
) -> None:
    chosen = select_blocks(pool, requests, block + 1, seed)[block]
    assert chosen == select_blocks(list(pool), requests, block + 1, seed)[block]
    assert len(chosen) == requests
    assert set(chosen) <= set(pool)
    counts = Counter(prompt.id for prompt in chosen)
    fewest = min(counts.get(prompt.id, 0) for prompt in pool)
    assert max(counts.values()) <= fewest + 1


@given(pools, st.integers(1, 30), st.integers(0, 6), st.integers(0, 99))
def test_a_block_is_balanced_over_categories(
    pool: list[Prompt], requests: int, block: int, seed: int
) -> None:
    chosen = select_blocks(pool, requests, block + 1, seed)[block]
    sizes = Counter(prompt.category for prompt in pool)
    taken = Counter(prompt.category for prompt in chosen)
    if requests <= len(pool):
        # A category gives less than another only when it has no more to give.
        most = max(taken.values())
        assert all(taken[c] >= min(most - 1, size) for c, size in sizes.items())


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_blocks_share_no_prompt_while_unused_ones_are_left(
    categories: int, share: int, blocks: int, seed: int
) -> None:
    pool = [
        Prompt(f"{c}-{i}", str(c), "text") for c in range(categories) for i in range(share * blocks)
    ]
    chosen = select_blocks(pool, categories * share, blocks, seed)
    seen = [prompt.id for block in chosen for prompt in block]
    assert len(seen) == len(set(seen))


def test_blocks_and_seeds_differ_even_when_they_use_all_prompts() -> None:
    pool = [Prompt(str(i), "c", "text") for i in range(8)]
    chosen = [block for seed in range(4) for block in select_blocks(pool, 8, 4, seed)]
    orders = {tuple(prompt.id for prompt in block) for block in chosen}
    assert len(orders) == 16


def test_a_block_is_the_same_on_every_machine() -> None:
    """Runs are compared across machines, so the choice must not hang on hashes or platforms."""
    pool = [Prompt(f"{category}{i}", category, "t") for category in "abc" for i in range(9)]
    chosen = [prompt.id for prompt in select_blocks(pool, 6, 3, 7)[2]]
    assert chosen == ["c6", "a6", "b1", "c8", "a7", "b3"]


def test_no_prompts_to_choose_from() -> None:
    with refused("", naming="no prompts"):
        select_blocks([], 1, 1, 0)


# --- encoding ---


class Words:
    """A tokenizer that gives each word its length."""

    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        assert [message["role"] for message in messages] == ["user"]
        return [100, *self.encode(messages[0]["content"]), 101]


TWO = [Prompt("a", "c", "one two"), Prompt("b", "c", "three four five")]


def test_encode_uses_the_chat_template_if_there_is_one() -> None:
    plain, chatty = Words(), Words()
    chatty.chat_template = "{{ messages }}"
    assert encode(TWO, plain, 100, 1) == [[3, 3], [5, 4, 4]]
    assert encode(TWO, chatty, 100, 1) == [[100, 3, 3, 101], [100, 5, 4, 4, 101]]
    assert encode([], plain, 100, 1) == []


def test_a_prompt_that_does_not_fit_is_named() -> None:
    assert encode(TWO, Words(), 5, 2)
    with refused("--max-model-len", value=4) as caught:
        encode(TWO, Words(), 4, 2)
    assert str(caught.value) == (
        "--max-model-len: 4 is invalid; prompt 'b' has 3 tokens and --max-new-tokens adds 2; "
        "write at least 5, or use shorter prompts (max_chars in the scenario)"
    )


def test_a_prompt_without_tokens_is_refused() -> None:
    with refused("prompt 'e'"):
        encode([Prompt("e", "c", " ")], Words(), 10, 1)


@pytest.mark.slow  # imports transformers
def test_a_real_tokenizer_with_a_chat_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[U]": 0, "one": 1, "two": 2, "<u>": 3, "<a>": 4}
    inner = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[U]")
    made.chat_template = (
        "{% for m in messages %}<u> {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    made.save_pretrained(tmp_path)
    tokenizer = module.load_tokenizer(tmp_path)
    assert encode([TWO[0]], tokenizer, 100, 1) == [[3, 1, 2, 4]]


@pytest.mark.slow  # transformers
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with refused("--model", value=str(tmp_path), naming="tokenizer"):
        module.load_tokenizer(tmp_path)
