"""nwor-bench pairs: fits a terminal of 80 columns, fetches once, tells where."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nwor_bench.cli.commands.pairs import app
from nwor_bench.models.pairs import pair_names

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


def output(*arguments: str) -> str:
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.slow
def test_list_names_every_pair_within_80_columns() -> None:
    text = output("list")
    assert all(name in text for name in pair_names())
    assert max(map(len, text.splitlines())) <= 80
    assert " yes " not in text  # the cache is empty
    output("fetch", "tiny")
    assert text != output("list")
    assert " yes " in output("list")


def test_show_cuts_nothing_off() -> None:
    text = output("show", "smollm2")
    assert max(map(len, text.splitlines())) <= 80
    joined = "".join(line.split()[-1] for line in text.splitlines() if line.strip())
    assert "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" in joined


def test_fetch_tells_where_and_that_it_was_there_already(tmp_path: Path) -> None:
    first, second = output("fetch", "tiny"), output("fetch", "tiny")
    assert "tiny: generating" in first
    assert "tiny: ready" in first
    assert "tiny: already there" in second
    assert "generating" not in second
    place = next(
        line.removeprefix("target: ") for line in second.splitlines() if "target: " in line
    )
    assert (Path(place) / "config.json").is_file()
    assert Path(place).is_relative_to(tmp_path)
