"""The shipped scenarios and prompts, and `nwor-bench scenarios`."""

import json
import re
from itertools import combinations

import pytest

from nwor_bench.workload.config import load_scenario
from nwor_bench.workload.prompts import builtin_categories, load_prompts, read_jsonl
from nwor_bench.workload.schedule import select_blocks
from nwor_bench.workload.toml_file import resource_dir

CATEGORIES = ("chat", "code", "maths", "retrieval", "summarising", "translation")
FILES = sorted((resource_dir("scenarios") / "prompts").glob("*.jsonl"))
ALL = [prompt for path in FILES for prompt in read_jsonl(path)]


def shingles(text: str, size: int = 6) -> list[str]:
    """Every run of `size` words; equal text shares them all, related text few."""
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))]


def test_there_are_enough_prompts_in_every_category() -> None:
    assert builtin_categories() == CATEGORIES
    assert len(ALL) >= 84
    for path in FILES:
        prompts = read_jsonl(path)
        assert len(prompts) >= 12
        assert {prompt.category for prompt in prompts} == {path.stem}


def test_ids_are_unique_and_start_with_their_category() -> None:
    assert len({prompt.id for prompt in ALL}) == len(ALL)
    for prompt in ALL:
        assert re.fullmatch(rf"{prompt.category}-[a-z0-9-]+", prompt.id)


def test_no_two_prompts_are_nearly_the_same() -> None:
    parts = {prompt.id: set(shingles(prompt.text)) for prompt in ALL}
    for a, b in combinations(ALL, 2):
        shared = len(parts[a.id] & parts[b.id])
        assert shared <= 0.2 * min(len(parts[a.id]), len(parts[b.id])), (a.id, b.id)


def test_length_does_not_come_from_repetition() -> None:
    for prompt in ALL:
        runs = shingles(prompt.text)
        assert len(set(runs)) > 0.8 * len(runs), prompt.id


def test_files_are_clean_text() -> None:
    for path in FILES:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
        assert b"\r" not in raw
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        for line in text.splitlines():
            row = json.loads(line)
            assert list(row) == ["id", "category", "text"]
            assert json.dumps(row, ensure_ascii=False) == line
            assert row["text"] == row["text"].strip()
            assert all(char.isprintable() or char in "\n\t" for char in row["text"])
            assert "\ufffd" not in row["text"]
            if row["category"] != "translation":
                assert row["text"].isascii(), row["id"]


@pytest.mark.parametrize("name", ["short", "medium", "long", "mixed"])
def test_each_scenario_has_prompts_for_three_blocks_of_its_own(name: str) -> None:
    scenario = load_scenario(name)
    prompts = load_prompts(scenario)
    assert len(prompts) >= 3 * scenario.requests
    chosen = [p for block in select_blocks(prompts, scenario.requests, 3, seed=0) for p in block]
    assert len({prompt.id for prompt in chosen}) == 3 * scenario.requests
    for prompt in prompts:
        assert len(prompt.text) >= scenario.prompts.min_chars
        assert len(prompt.text) <= (scenario.prompts.max_chars or 10**9)


def test_mixed_has_every_length() -> None:
    sizes = [len(prompt.text) for prompt in load_prompts(load_scenario("mixed"))]
    assert sum(size <= 800 for size in sizes) >= 40
    assert sum(800 < size <= 4000 for size in sizes) >= 20
    assert sum(size >= 6000 for size in sizes) >= 12
