"""Is acceptance equal in off and stage: the interval, and the kept run's table."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

KEPT = Path(__file__).parents[2] / "sweeps/studies/acceptance/acceptance.csv"
Study = Callable[[str, str], ModuleType]


def counts(windows: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks of so many windows with drafts accepted one after the other at those rates."""
    accepted = [rng.binomial(windows, rates[0])]
    for rate in rates[1:]:
        accepted.append(rng.binomial(accepted[-1], rate))
    return np.stack([windows, *accepted], axis=1)


def test_with_equal_blocks_it_is_the_paired_t_interval(study: Study) -> None:
    page = study("acceptance", "page")
    rng = np.random.default_rng()
    windows = np.full(9, 150)
    off, stage = (counts(windows, np.array([0.5, 0.6, 0.6]), rng) for _ in range(2))
    found = page.differences(off, stage)
    assert [d.name for d in found] == [
        "acceptance length",
        *(f"draft {i} accepted" for i in (1, 2, 3)),
    ]
    rates = [values[:, 1:] / values[:, :1] for values in (off, stage)]
    for d, a, b in zip(found[1:], rates[0].T, rates[1].T, strict=True):
        exact = stats.ttest_rel(b, a).confidence_interval()
        assert (d.low, d.high) == pytest.approx((exact.low, exact.high))
        assert (d.off, d.stage) == pytest.approx((a.mean(), b.mean()))
    assert found[0].stage == pytest.approx(1 + rates[1].sum(axis=1).mean())


@pytest.mark.slow  # many simulated runs
def test_the_interval_holds_the_truth_where_blocks_differ_in_size(study: Study) -> None:
    """400 runs of 12 blocks with a true difference of 0.05 at the first position."""
    page, rng = study("acceptance", "page"), np.random.default_rng(5)
    held = 0
    for _ in range(400):
        windows = rng.integers(80, 220, 12)
        off = counts(windows, np.array([0.50, 0.6]), rng)
        stage = counts(windows, np.array([0.55, 0.6]), rng)
        first = page.differences(off, stage)[1]
        held += first.low <= 0.05 <= first.high
    assert 0.92 <= held / 400 <= 0.98


def write_run(folder: Path, rows: pd.DataFrame) -> None:
    """A run folder with what `measure.py` reads: the kept run's blocks as batches."""
    per_position = rows[[f"accepted_{i}" for i in range(1, 5)]].astype(str).agg(";".join, axis=1)
    modes = rows["cell"].str.split(" x ", expand=True)
    batches = pd.DataFrame(
        {
            "pair": "smollm2", "nwor_mode": modes[0], "scv_mode": modes[1], "phase": "timed",
            "block": rows["block"], "batch": range(len(rows)), "order": 0,
            "requests": rows["requests"], "prompt_tokens": 8, "output_tokens": 256,
            "latency_ms": 1.0, "tokens_per_s": 1.0, "windows": 20, "draft_tokens": 400,
            "accepted_tokens": 100, "staged_tokens": 0, "committed_tokens": 0,
            "vllm_num_drafts": rows["windows"], "vllm_draft_tokens": 400,
            "vllm_accepted_tokens": 100, "vllm_accepted_per_position": per_position,
            "parity": "", "prompt_digest": "a", "token_digests": [
                ";".join(["same"] * n + [cell] * (8 - n))
                for n, cell in zip(rows["same_text_as_off"], rows["cell"], strict=True)
            ],
            "temperature": 0.0, "seed": 0, "started_at": "2026-01-01T00:00:00+00:00",
            "fallbacks": "{}", "scv_counters": "{}",
        }
    )  # fmt: skip
    batches.to_csv(folder / "batches.csv", index=False)
    off = rows[rows["cell"] == "off x off"]
    blocks = [
        {"block": block, "prompt_ids": prompts.split(";")}
        for block, prompts in zip(off["block"], off["prompts"], strict=True)
    ]
    header = {"command": rows["command"].iloc[0], "blocks": blocks}
    (folder / "run.json").write_text(json.dumps(header))


@pytest.mark.slow
def test_a_run_that_accepts_less_in_stage_ends_with_1(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = pd.read_csv(KEPT)
    write_run(tmp_path, rows)
    main = study("acceptance", "measure").main
    monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path)])
    assert main() == 0
    page = capsys.readouterr().out
    assert "| NO " not in page
    assert page.strip() == KEPT.with_name("README.md").read_text().strip()
    staging = rows["cell"].str.startswith("stage")
    positions = [f"accepted_{i}" for i in range(1, 5)]
    rows.loc[staging, positions] = rows.loc[staging, positions] // 2
    write_run(tmp_path, rows)
    assert main() == 1
    assert capsys.readouterr().out.count("| NO ") == 5


def test_a_kept_run_gives_its_csv_again(study: Study, tmp_path: Path) -> None:
    rows = pd.read_csv(KEPT)
    write_run(tmp_path, rows)
    made = study("acceptance", "measure").rows_of(tmp_path)
    kept = rows.fillna("").astype(str)
    pd.testing.assert_frame_equal(made.fillna("").astype(str), kept)


def test_the_kept_run_gains_two_tokens_a_window(study: Study) -> None:
    _, found = study("acceptance", "page").document(pd.read_csv(KEPT))
    assert min(found[0].off, found[0].stage) >= 2.0
