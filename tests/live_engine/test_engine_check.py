"""`nwor-bench check` on real vLLM: two stock engines, and a planted rejection sampler."""

from pathlib import Path
from typing import Any

import pytest
from planted_check import accept_a_wrong_draft

from nwor_bench.analysis.check import Check, CheckVerdict
from nwor_bench.cli.commands.check import check_file
from nwor_bench.errors import ExitCode
from nwor_bench.report.check import check_answer
from nwor_bench.report.sweep import swept_check
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import swept_runs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("environment_given_back", "figures_left_out"),
]


def check(folder: Path, pair: str, requests: tuple[int, ...], **flags: Any) -> Check:
    """What the command finds with these flags; its exit code is that of the verdict."""
    given = {"dtype": "float32", "max_new_tokens": 24, **flags}
    code = run_loaded(check_file(pair, requests, given), RunOptions(output=folder, quiet=True))
    found = swept_check(swept_runs(SweepIndex.open(folder)))
    assert found is not None
    assert code is check_answer(found).exit_code
    return found


def test_a_sound_pair_is_right_and_a_short_drafter_is_named(tmp_path: Path) -> None:
    """Both engines are stock, and one has no drafter. Past its longest context vLLM accepts none of
    its drafts, and the output stays right."""
    short = '{"max_model_len": 100}'
    found = check(tmp_path / "check", "tiny-mtp", (1, 3), draft_tokens=2, speculative_config=short)
    assert [own.verdict for own in found.sizes] == [CheckVerdict.RIGHT] * 2
    assert [own.tokens for own in found.sizes] == [24, 72]
    assert all(len(own.acceptance) == 2 and not own.places for own in found.sizes)
    engine = found.header.engine
    assert engine.attention_backend == "CPUAttentionBackendImpl"  # stock's own
    assert engine.staging_unavailable == "no_speculation"
    assert engine.drafter_max_model_len is None
    assert {arm: facts["drafter_max_model_len"] for arm, facts in (engine.arms or {}).items()} == {
        "k=2": 100
    }
    assert ["100 tokens" in cause for cause in found.to_dict()["known_causes"]] == [True]


def test_one_wrong_draft_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nwor_bench.engine.arms._serve", accept_a_wrong_draft)
    found = check(tmp_path / "check", "tiny", (2,))
    assert found.worst.verdict is CheckVerdict.WRONG
    first = found.worst.places[0]
    assert not first["is_tie"]
    assert first["token"] != first["reference"]
    answer = check_answer(found)
    assert answer.exit_code is ExitCode.CORRECTNESS_BROKEN
    assert f"token {first['position']} of request {first['request']}" in answer.sentence
    assert "WRONG" in (tmp_path / "check/summary.md").read_text()
