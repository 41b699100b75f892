"""Golden files of `live`: recorded /metrics with what the command makes of them, byte for byte.

`server_*` were read from `vllm serve` on a CPU, `published_*` are what a worker publishes of the
windows of `planted_windows`. After a change that is wanted, run it with NWOR_WRITE_GOLDEN=1.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import serving

GOLDEN = Path(__file__).parents[1] / "golden" / "live"

CASES: dict[str, tuple[str, ...]] = {
    "server_modes": (),
    "server_modes_at_start": (),
    "server_drafts": (),
    "server_drafts_at_start": (),
    "published_modes": ("--num-reqs", "8"),
    "published_drafts": (),
    "stopped": ("--strict",),
}
"""Flags by recorded page."""

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("own_surroundings")


def told(run: Run, name: str) -> dict[str, str]:
    """What the command says of a page: file name -> text."""
    page = (GOLDEN / f"{name}.prom").read_text(encoding="utf-8")
    page = re.sub(r"(nwor_live_updated_seconds{.*}) .*", rf"\1 {time.time()}", page)
    said = {}
    for ending, flags in (("json", ("--json",)), ("txt", ())):
        with serving(page) as server:
            flags = (*flags, "--time-budget", "0.01s", *CASES[name])
            code, out, err = run("live", server.url, *flags)
        assert err == ""
        out = re.sub(r'"(waited_s|nwor_bench)": [^,]+', r'"\1": 0', out.replace(server.url, "URL"))
        out = re.sub(r"\d+\.\d{10,}", lambda found: f"{float(found[0]):.10g}", out)
        said[f"{name}.{ending}"] = f"{out}exit code {code}\n" if ending == "txt" else out
    return said


@pytest.mark.parametrize("name", CASES)
def test_the_command_says_the_same_of_recorded_metrics(command_line: Run, name: str) -> None:
    for file, text in told(command_line, name).items():
        if os.environ.get("NWOR_WRITE_GOLDEN"):
            (GOLDEN / file).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / file).read_text(encoding="utf-8")
