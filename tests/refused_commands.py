"""The table of refusals: command lines in golden/refusals, and what each says; nothing heavy."""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import typer

from nwor_bench.cli import app as cli

GOLDEN = Path(__file__).parent / "golden"


def answered(table: str) -> str:
    """The table with its answers made anew."""
    lines = []
    with _alone():
        for line in table.splitlines():
            if line.startswith("> "):
                name, _, text = line[2:].partition(" ")
                Path(name).parent.mkdir(exist_ok=True)
                kept = text.partition("GOLDEN ")[2]
                Path(name).write_text(
                    (GOLDEN / kept).read_text() if kept else text.replace("\\n", "\n")
                )
            if line[:2] in ("> ", "$ ", "# ", ""):
                lines.append(line)
            if line.startswith("$ "):
                lines.append(refusal_of(line[2:]))
    return "\n".join(lines) + "\n"


def refusal_of(line: str) -> str:
    """The exit code and the error of a command line, which leaves nothing behind."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
    said, before = io.StringIO(), sorted(Path.cwd().rglob("*"))
    with (
        patch.object(sys, "argv", ["nwor-bench", *words[len(variables) :]]),
        patch.dict(os.environ, variables),
        redirect_stdout(io.StringIO()),
        redirect_stderr(said),
    ):
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    assert sorted(Path.cwd().rglob("*")) == before, f"{line} left something behind"
    here = str(Path.cwd())
    text = said.getvalue().replace(f"{here}/", "").replace(here, ".")
    return f"{code} " + text.rstrip().replace("\n", "\n  ")


@contextmanager
def _alone() -> Iterator[None]:
    """In an empty folder, without a GPU and built pairs; no engine starts."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it went on to vLLM")

    def goes_on() -> None:
        from nwor_bench.run.prepare import run_one
        from nwor_bench.run.sweep import run_loaded

        for function in (run_one, run_loaded):
            own = {"engine_factory": refuse, "check_engine": refuse}
            stack.enter_context(patch.dict(function.__kwdefaults__, own))

    variables = {"COLUMNS": "80", "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""}
    with (
        TemporaryDirectory() as folder,
        TemporaryDirectory() as pairs,
        ExitStack() as stack,
        chdir(folder),
        patch.dict(os.environ, variables | {"NWOR_BENCH_CACHE": pairs}),
        patch("nwor_bench.engine.preload.run_under_one_openmp", goes_on),
        patch("typer.main.get_command", cache(typer.main.get_command)),
    ):
        for name in ("TARGET_MODEL", "DRAFT_MODEL"):
            os.environ.pop(name, None)
        yield
