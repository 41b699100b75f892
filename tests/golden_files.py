"""Golden files: what `report`, `compare` and `--help` give for the kept runs in tests/golden.

Each run folder there holds a run's records, and beside them what `report` makes of these;
tests/golden/printed is what commands print. If a change of bytes is wanted, this writes all anew,
and the changelog names the change:

    PYTHONPATH=tests:tests/report:. python tests/golden_files.py
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import said
import typer
from refused_commands import answered
from synthetic_run import without_figures

from nwor_bench import __version__
from nwor_bench.cli import app as cli
from nwor_bench.records.files import KEPT_RECORDS_FILE, RUN_FILE, SWEEP_FILE

GOLDEN = Path(__file__).parent / "golden"

RUNS = (
    "grid", "interleaved", "worth", "worth-one", "staged", "engines", "slot", "states", "invalid",
)  # fmt: skip
"""The first two ran on an H200, the others on a CPU with generated models of a few layers. In
`invalid` the commit of staged K/V was broken on purpose."""

SIZES = ("worth", "worth-one")
"""Runs that the folder `sizes` holds: `worth` at two batch sizes."""

SUMMARIES = ("noise_floor", "findings", "cells", "split", "violations", "warnings")
"""Keys of run.json that a report computes."""

PRINTED = {
    "sizes.json": "report sizes --json",
    "sizes.txt": "report sizes --verbose",
    "invalid.txt": "report invalid --verbose",
    "slower.json": "compare grid slower --json",
    "slower.md": "compare grid slower --markdown",
    "slower.txt": "compare grid slower",
    "slower-quiet.txt": "compare grid slower -q",
    "broken.json": "compare slot broken --json",
    "slower-sizes.json": "compare sizes slower-sizes --json",
    "slower-sizes.txt": "compare sizes slower-sizes",
}
"""Commands whose output is kept, run beside the runs; `slower` and `broken` are changed ones."""

PREDICTED = {
    "plan.txt": "plan Llama-3.2-3B.json",
    "plan.json": "plan Llama-3.2-3B.json --acceptance 25% --json",
    "plan-quiet.txt": "plan Llama-3.2-3B.json -q",
    "plan-flags.txt": "plan Llama-3.1-8B.json --acceptance 0.8 --cache-dtype fp8 -v "
    "--weight-dtype int4 --tensor-parallel-size 2 --device L40S",
    "plan-experts.txt": "plan Qwen3-30B-A3B.json",
    "plan-latent.txt": "plan DeepSeek-V3.json",
    "plan-states.txt": "plan Qwen3.5-27B.json --requests 2 -v",
    "plan-states.json": "plan Qwen3.5-27B.json --requests 2 --json",
    "plan-mamba.txt": "plan Nemotron-H-56B.json",
    "plan-pair.txt": "plan gpt-oss-20b-shape --device rtx4090",
    "plan-cpu.txt": "plan Qwen3.5-27B.json --device cpu",
    "plan-nvfp4.txt": "plan Llama-3.2-3B.json --device b200 --cache-dtype nvfp4",
    "scenarios.txt": "list scenarios",
    "scenarios.json": "list scenarios --json",
    "scenarios-quiet.txt": "list scenarios -q",
}
"""Commands that only read config.json files (tests/data/configs) and our own lists."""

LONG = ("report.html", "batches.csv", "windows.csv")
"""Files of a run of which only the digest is kept; of the page its words too."""

SUMMARY_FILES = ("summary.csv", "summary.md", "worth.csv")
"""Files of the folder `sizes` that are kept too."""


def of_run(name: str) -> dict[str, str]:
    """Files that `report` makes of a run, what it prints, and its `--json`, by their names."""
    with _beside(name):
        printed = printed_by(f"report {name} --json")
        text = {path.name: _read(path) for path in Path(name).iterdir() if not _given(path)}
        text["terminal.txt"] = printed_by(f"report {name}")
    page = text["report.html"]
    digests = {file: hashlib.sha256(text.pop(file).encode()).hexdigest() for file in LONG}
    return {
        **text,
        "result.json": printed,
        "page.html": _words(page),
        "digests.json": json.dumps(digests, indent=2) + "\n",
    }


def of_commands() -> dict[str, str]:
    """What commands print, and the files of a sweep folder, by their names in golden/printed."""
    with _beside(*RUNS), without_figures():
        _copy_runs(Path("sizes"), factor=1.0)
        _copy_runs(Path("slower-sizes"), factor=1.3)
        _copy("grid", Path("slower"), factor=1.3)
        _copy("slot", Path("broken"), factor=1.0, broken=True)
        found = {file: printed_by(line) for file, line in PRINTED.items()}
        found |= {file: _read(Path("sizes") / file) for file in SUMMARY_FILES}
        found["summary.page.html"] = _words(_read(Path("sizes/summary.html")))
    return found


def of_predictions() -> dict[str, str]:
    """What commands say of models before anything runs, by the names in golden/predicted."""
    with chdir(GOLDEN.parent / "data" / "configs"):
        return {file: printed_by(line) for file, line in PREDICTED.items()}


def of_help() -> dict[str, str]:
    """The help of every command and group at 80 columns, by their names in golden/help."""
    return {f"{path.replace(' ', '-') or 'nwor-bench'}.txt": printed_by(f"{path} --help")
            for path in command_paths(typer.main.get_command(cli.app))}  # fmt: skip


def of_refusals() -> dict[str, str]:
    """Every command line in golden/refusals, with its exit code and what it says."""
    return {name: answered(text) for name, text in stored("refusals").items()}


def of_made_up_runs() -> dict[str, str]:
    """What is said of made-up runs (tests/report/said.py), by the names in golden/said."""
    return {name: _rounded(text) for name, text in said.said()}


def command_paths(node: object, path: str = "") -> Iterator[str]:
    """Every group and command of the command line, as one types it."""
    yield path
    for name, child in getattr(node, "commands", {}).items():
        yield from command_paths(child, f"{path} {name}".strip())


def printed_by(line: str) -> str:
    """What `nwor-bench LINE` prints, and its exit code, without our version."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", ["nwor-bench", *line.split()]),
        patch.dict(os.environ, {"COLUMNS": "80", "TERM": "dumb"}),
        redirect_stdout(printed),
    ):
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
    text = _rounded(printed.getvalue().replace(f'"{__version__}"', '"VERSION"'))
    return text if code == 0 else f"{text}exit code {int(str(code))}\n"


def _given(path: Path) -> bool:
    """A file that is never rewritten."""
    return path.name in (KEPT_RECORDS_FILE, SWEEP_FILE)


@contextmanager
def _beside(*names: str) -> Iterator[None]:
    """In a folder with copies of these runs, without anything that a report computes."""
    with TemporaryDirectory() as folder, chdir(folder):
        for name in names:
            _copy(name, Path(name))
        yield


def _copy_runs(folder: Path, factor: float) -> None:
    """A sweep folder of two runs, `worth` at two batch sizes."""
    for name in SIZES:
        _copy(name, folder / name, factor)
    shutil.copy(GOLDEN / "printed" / SWEEP_FILE, folder)


def _copy(name: str, to: Path, factor: float = 1.0, *, broken: bool = False) -> None:
    """Copy a run's records; cells other than the reference `factor` times as slow, or broken."""
    to.mkdir(parents=True)
    header = json.loads((GOLDEN / name / RUN_FILE).read_text())
    kept = {key: value for key, value in header.items() if key not in SUMMARIES}
    (to / RUN_FILE).write_text(json.dumps(kept))
    records = gzip.decompress((GOLDEN / name / KEPT_RECORDS_FILE).read_bytes())
    if factor != 1.0 or broken:
        lines = [json.loads(line) for line in records.splitlines()]
        changed = [json.dumps(_changed(line, factor, broken=broken)) + "\n" for line in lines]
        records = "".join(changed).encode()
    (to / KEPT_RECORDS_FILE).write_bytes(gzip.compress(records, 1))


def _changed(line: dict[str, object], factor: float, *, broken: bool) -> dict[str, object]:
    """A record of a cell other than the reference, changed."""
    if line.get("nwor_mode") != "stage" and line.get("arm") not in ("k=1", "k=2"):
        return line
    if broken and line.get("phase") == "gate":
        line |= {"parity": "INVALID", "first_mismatch": "request 0, token 3: 17 instead of 4"}
    times = ("latency_ms", "wall_ms", "device_ms")
    return line | {key: line[key] * factor for key in times if isinstance(line.get(key), float)}  # type: ignore[operator]


def _read(path: Path) -> str:
    return _rounded(path.read_text())


def _rounded(text: str) -> str:
    """The text without the digits of a float that another processor may give differently."""
    return re.sub(r"\d+\.\d{9,}(e-?\d+)?", lambda found: f"{float(found[0]):.11g}", text)


def _words(page: str) -> str:
    """A page without its styles and drawings, to read a difference in."""
    return re.sub(r"<(style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)


def stored(folder: str) -> dict[str, str]:
    """The golden files of a folder."""
    return {path.name: path.read_text() for path in (GOLDEN / folder).iterdir() if not _given(path)}


def write(folder: str, files: dict[str, str]) -> None:
    """Replace the golden files of a folder."""
    (GOLDEN / folder).mkdir(exist_ok=True)
    for path in (GOLDEN / folder).iterdir():
        if not _given(path) and path.name not in files:
            path.unlink()
    for name, text in files.items():
        (GOLDEN / folder / name).write_text(text)


if __name__ == "__main__":
    for run in RUNS:
        write(run, of_run(run))
    write("printed", of_commands())
    write("help", of_help())
    write("said", of_made_up_runs())
    write("refusals", of_refusals())
    write("predicted", of_predictions())
