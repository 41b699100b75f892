"""Arms as the command line writes them, and the models that they need."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from refusals import refused
from synthetic_run import make_run, with_parts

from nwor_bench.models.arms import read_arms, with_arms
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.cell import AA, Arguments, Drafts, MethodCount
from nwor_bench.run.resume import check_same
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import PairChoice

TINY = PairChoice(pair="tiny")
"""Drafts with a draft model of its own."""


def test_an_arm_is_a_method_a_drafter_or_json() -> None:
    texts = ["ngram", "eagle3=org/head", 'mine={"method": "eagle3", "model": "a=b"}']
    assert read_arms("--arm", texts) == {
        "ngram": {"method": "ngram"},
        "eagle3": {"model": "org/head", "method": "eagle3"},
        "mine": {"method": "eagle3", "model": "a=b"},
    }


@pytest.mark.parametrize(
    ("texts", "field", "naming"),
    [
        (["eagl"], "--arm", "'eagle'"),
        (["mine=org/head"], "--arm", "mtp"),
        (['{"method": "ngram"}'], "--arm", "NAME={JSON}"),
        (['x={"method": }'], "--arm x", "JSON"),
        (['x={"model": "org/head"}'], "--arm: x: method", "mtp"),
        (["ngram", "ngram"], "--arm", "two arms"),
    ],
)
def test_what_is_no_arm_is_refused(texts: list[str], field: str, naming: str) -> None:
    with refused(field, naming=naming):
        read_arms("--arm", texts)


def test_a_drafter_is_needed_or_not_taken() -> None:
    pair = resolve_pair("tiny")
    with refused("--arm", naming="eagle=FOLDER_OR_HUB_NAME"):
        with_arms(pair, TINY, {"eagle": {"method": "eagle"}})
    second = 'speculative_config={"method": "..."}'
    with refused("--against", naming='"model": "FOLDER_OR_HUB_NAME"'):
        with_arms(pair, TINY, {second: {"method": "eagle"}})
    with refused("--against", value="eagl", near="eagle"):
        with_arms(pair, TINY, {second: {"method": "eagl"}})
    with refused("--draft-model"):
        with_arms(pair, TINY, {"ngram": {"method": "ngram", "model": "org/head"}})
    with refused("--draft-model"):
        with_arms(pair, TINY, {"eagle": {"method": "eagle", "model": "/no/folder"}})


def test_each_engine_has_its_arms_drafter(tmp_path: Path) -> None:
    arms = {
        "draft_model": {"method": "draft_model"},
        "ngram": {"method": "ngram", "prompt_lookup_max": 5},
    }
    pair = with_arms(resolve_pair("tiny"), TINY, arms)
    shared, own = Arguments("draft_model"), Drafts(MethodCount("ngram", 2))
    assert pair.of_arm(shared).draft is not None
    assert (pair.of_arm(own).method, pair.of_arm(own).draft) == ("ngram", None)
    assert pair.of_arm(own).speculative["prompt_lookup_max"] == 5
    assert pair.of_arm(AA) is pair.of_arm(None) is pair


def test_a_run_of_several_methods_can_be_resumed() -> None:
    pair = with_arms(resolve_pair("tiny"), TINY, {"ngram": {"method": "ngram"}})
    spec = resolve(load_scenario("short"))
    parts = {"pair": asdict(pair), "spec": spec.to_dict()}
    run = with_parts(make_run(), **json.loads(json.dumps(parts)))
    check_same(run, spec, pair, run.header.environment)
    with refused("pair.arms"):
        check_same(run, spec, replace(pair, arms={}), run.header.environment)
