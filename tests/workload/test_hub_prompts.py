"""Prompts from the rows of a hub data set; no test reads the hub."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from test_prompts import scenario_with

from nwor_bench.workload import prompts as module
from nwor_bench.workload.config import Scenario, load_scenario
from nwor_bench.workload.prompts import PLACEHOLDER, first_turn, load_prompts
from nwor_bench.workload.schedule import select_blocks

HUB_ROWS = [
    {"body": "short", "lang": "en"},
    {"body": "ein langer Satz", "lang": "de"},
    {"body": "a long sentence", "lang": "en"},
    {"body": "another long sentence", "lang": "en"},
    {"body": "a third long sentence", "lang": "en"},
]


def test_hub_rows_are_filtered_instructed_and_limited() -> None:
    asked: list[tuple[str, str | None, str]] = []
    read = 0

    def loader(*names: Any) -> Iterator[dict[str, str]]:
        nonlocal read
        asked.append(names)
        for row in HUB_ROWS:
            read += 1
            yield row

    source = {
        "source": "hub",
        "dataset": "someone/texts",
        "dataset_config": "v1",
        "split": "test",
        "field": "body",
        "where": {"lang": "en"},
        "instruction": "Shorten:",
        "min_chars": 16,
        "limit": 2,
    }
    kept = load_prompts(scenario_with(**source), loader)
    assert asked == [("someone/texts", "v1", "test")]
    assert [prompt.text for prompt in kept] == [
        "Shorten:\n\na long sentence",
        "Shorten:\n\nanother long sentence",
    ]
    assert len({prompt.id for prompt in kept}) == 2
    assert read == 4  # a stream is not read past the limit


def test_hub_field_must_exist() -> None:
    source = {"source": "hub", "dataset": "d", "field": "bdy"}
    with refused("prompts.field", value="bdy", near="body"):
        load_prompts(scenario_with(**source), lambda *names: HUB_ROWS)


def test_hub_without_the_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", missing)
    with refused("prompts.dataset", value="d", cause=ImportError, naming="pip install datasets"):
        load_prompts(scenario_with(source="hub", dataset="d", field="f"))


def test_hub_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(*names: object, **options: object) -> Any:
            raise ConnectionError("no route")

    monkeypatch.setattr(module, "import_module", lambda name: Library)
    with refused("prompts.dataset", value="d", cause=ConnectionError, naming="(no route)"):
        load_prompts(scenario_with(source="hub", dataset="d", field="f"))


# --- turns, placeholders, categories ---

CATEGORIES = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem",
    "summarization", "writing",
)  # fmt: skip
LEFT_OUT: tuple[Any, ...] = (
    None, "", "  ", [], [""], [" \n"], [{"role": "user"}], [{"role": "assistant", "content": "a"}],
    PLACEHOLDER, [PLACEHOLDER], [f"{PLACEHOLDER}\n\nSummarise: {{article}}", "And shorter?"],
    [{"role": "user", "content": PLACEHOLDER}],
)  # fmt: skip


def speed_bench_row(number: int, category: str, turns: Any) -> dict[str, Any]:
    """A row with SPEED-Bench's columns and made-up values."""
    return {
        "question_id": f"q{number}",
        "category": category,
        "sub_category": None,
        "turns": turns,
        "source": "made up",
        "src_id": str(number),
        "difficulty": None,
        "multiturn": isinstance(turns, list) and len(turns) > 1,
    }


def speed_bench(*, usable: int, placeholders: int) -> list[dict[str, Any]]:
    """So many rows of each category, sorted by category."""
    cells = [
        (category, [f"{category} {n}?", "Why?"] if n < usable else [PLACEHOLDER])
        for category in CATEGORIES
        for n in range(usable + placeholders)
    ]
    return [speed_bench_row(n, *cell) for n, cell in enumerate(cells)]


def with_source(scenario: Scenario, **changes: Any) -> Scenario:
    source = scenario.prompts.model_copy(update=changes)
    return scenario.model_copy(update={"prompts": source})


def test_the_shipped_scenario_reads_speed_bench() -> None:
    scenario = load_scenario("speed-bench")
    asked: list[tuple[str, str | None, str]] = []

    def loader(*names: Any) -> list[dict[str, Any]]:
        asked.append(names)
        return speed_bench(usable=40, placeholders=40)

    prompts = load_prompts(scenario, loader)
    assert asked == [("nvidia/SPEED-Bench", "qualitative", "test")]
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 40)
    assert all(prompt.text.startswith(f"{prompt.category} ") for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    # Categories take turns: 8 of 11 in a block, and 11 blocks of 8 give each the same.
    blocks = select_blocks(prompts, scenario.requests, len(CATEGORIES), seed=0)
    assert all(len({prompt.category for prompt in block}) == 8 for block in blocks)
    taken = Counter(prompt.category for block in blocks for prompt in block)
    assert taken == dict.fromkeys(CATEGORIES, 8)


def test_the_shipped_scenarios_longest_prompt_fits_at_two_characters_a_token() -> None:
    scenario = load_scenario("speed-bench")
    assert scenario.prompts.max_chars is not None
    assert scenario.prompts.max_chars / 2 + scenario.max_new_tokens <= scenario.max_model_len


def test_categories_of_a_hub_column_can_be_chosen() -> None:
    rows = speed_bench(usable=2, placeholders=1)
    chosen = with_source(load_scenario("speed-bench"), categories=("rag", "qa"))
    kept = load_prompts(chosen, lambda *names: rows)
    assert [prompt.category for prompt in kept] == ["qa", "qa", "rag", "rag"]
    without = with_source(load_scenario("speed-bench"), category_field=None)
    assert {prompt.category for prompt in load_prompts(without, lambda *names: rows)} == {"hub"}


def test_a_data_set_without_a_usable_row_is_refused_with_counts() -> None:
    shipped = load_scenario("speed-bench")
    rows = [
        *(speed_bench_row(n, "qa", turns) for n, turns in enumerate(LEFT_OUT)),
        speed_bench_row(98, "qa", ["a" * 20_000]),
        speed_bench_row(99, "rag", ["fine"]),
    ]
    only_qa = with_source(shipped, where={"category": "qa"})
    with refused("prompts.field", value="turns", naming=f"{len(LEFT_OUT)} empty or") as caught:
        load_prompts(only_qa, lambda *names: rows)
    assert "1 of another length or category" in str(caught.value)
    with refused("prompts.field", naming="nvidia/SPEED-Bench"):
        load_prompts(shipped, lambda *names: [])


@pytest.mark.parametrize(
    ("turns", "category_field", "field", "wanted"),
    [
        (["fine"], "categry", "prompts.category_field", {"near": "category"}),
        ([17, 4], "category", "prompts.field", {"value": "turns", "cause": TypeError}),
        (3.5, "category", "prompts.field", {"value": "turns", "cause": TypeError}),
    ],
)
def test_a_column_that_is_missing_or_holds_no_text_is_refused(
    turns: Any, category_field: str, field: str, wanted: dict[str, Any]
) -> None:
    rows = [speed_bench_row(0, "qa", turns)]
    scenario = with_source(load_scenario("speed-bench"), category_field=category_field)
    with refused(field, **wanted):
        load_prompts(scenario, lambda *names: rows)


texts = st.text(min_size=1, max_size=9).filter(str.strip)
shapes = st.sampled_from(
    (
        lambda text: text,
        lambda text: [text],
        lambda text: [text, "Go on."],
        lambda text: [{"role": "user", "content": text}],
        lambda text: [{"role": "system", "content": "Be brief."}, {"content": text}],
    )
)
cells = st.tuples(st.sampled_from(CATEGORIES), st.builds(lambda f, t: (f(t), t), shapes, texts))


@given(st.lists(cells | st.sampled_from(LEFT_OUT), max_size=20), st.integers(1, 20))
def test_usable_rows_keep_text_category_and_order(drawn: list[Any], limit: int) -> None:
    rows: list[Mapping[str, Any]] = []
    wanted: list[tuple[str, str]] = []
    for number, cell in enumerate(drawn):
        if isinstance(cell, tuple):
            category, (turns, text) = cell
            wanted.append((category, text))
            assert first_turn(turns) == text
        else:
            category, turns = "qa", cell
            assert first_turn(turns) is None
        rows.append(speed_bench_row(number, category, turns))
    scenario = with_source(load_scenario("speed-bench"), limit=limit)
    if not wanted:
        with refused("prompts.field"):
            load_prompts(scenario, lambda *names: rows)
        return
    kept = load_prompts(scenario, lambda *names: rows)
    assert [(prompt.category, prompt.text) for prompt in kept] == wanted[:limit]
