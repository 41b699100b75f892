"""The checklist's rows, and a record of how their tests ended: `pytest --support-json FILE`.

A test names its row with `@pytest.mark.row("...")`. What it saw of windows that were written
directly it says through `record_property("written_directly", reason)`, and what a reader must
know through `record_property("note", text)`. `sweeps/studies/support` makes the table of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

ROWS = (
    "one request",
    "several requests",
    "requests that finish inside a window",
    "prefill beside decode",
    "full acceptance",
    "partial acceptance",
    "no acceptance",
    "stop strings inside a window",
    "max tokens inside a window",
    "temperature and top-p",
    "seeds",
    "penalties",
    "structured output",
    "preemption under a small cache",
    "shared prefixes",
    "async scheduling",
    "LoRA",
    "ngram",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "Llama",
    "Qwen",
    "Gemma, sliding window, one cache group",
    "Gemma, sliding window, several cache groups",
    "mixture of experts",
    "latent attention (MLA)",
    "layers that share K/V",
    "tensor parallelism",
    "CUDA graphs",
    "fp8 cache",
    "faults inside a window",
    "vllm serve",
    "cancelled requests",
)
"""In the order of the table. A row without a test stays in it, empty."""

OUTCOMES = pytest.StashKey[list[dict[str, Any]]]()


def rows_of(item: pytest.Item) -> list[str]:
    """The rows that a test stands for; raises UsageError for one that the table does not have."""
    rows = list(dict.fromkeys(mark.args[0] for mark in item.iter_markers("row")))
    for row in rows:
        if row not in ROWS:
            raise pytest.UsageError(f'{item.nodeid}: row("{row}") is none of support_rows.ROWS')
    return rows


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support-json", type=Path, help="write how the rows' tests ended there")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rows_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Keep what a row's test says when it has run, or when its set-up has not let it run."""
    report = yield
    if rows_of(item) and (report.when == "call" or report.outcome != "passed"):
        properties = item.user_properties
        item.config.stash[OUTCOMES].append(
            {
                "rows": rows_of(item),
                "test": item.nodeid,
                "outcome": report.outcome,
                "written_directly": sorted({v for k, v in properties if k == "written_directly"}),
                "notes": sorted({v for k, v in properties if k == "note"}),
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--support-json")
    if path is not None:
        tests = [t for t in session.config.stash[OUTCOMES] if t["outcome"] != "skipped"]
        facts = {**_surroundings(), "rows": ROWS, "tests": tests}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


def _surroundings() -> dict[str, str]:
    """Where the tests ran: imported here, since a session that starts no engine needs none."""
    import torch

    from nwor_bench.instruments.versions import require_supported_vllm

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    return {"device": device, "vllm": require_supported_vllm(), "torch": torch.__version__}
