"""The commands as a user meets them: at once, within 80 columns, with the promised exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from nwor_bench import __version__
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.workload.config import load_scenario, resolve

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = CHECKOUT / "tests/data/configs/Llama-3.2-3B.json"
HEAVY = ("torch", "vllm", "pandas", "scipy", "transformers", "matplotlib", "numpy")
TINY = ("sweep", "--pair", "tiny", "--requests", "2", "--batches", "2", "--max-new-tokens", "6")

Run = Callable[..., tuple[int, str, str]]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings", "engine")]


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_help_and_predictions_load_nothing_heavy() -> None:
    """In one process: what any of them loads is still loaded at its end."""
    commands = ("sweep", "report", "doctor", "compare", "list", "plan")
    script = (
        "import sys\n"
        "from nwor_bench.cli.app import main\n"
        "def show(arguments, heavy):\n"
        "    sys.argv = ['nwor-bench', *arguments]\n"
        "    print(flush=True)\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        "    loaded = [name for name in heavy if name in sys.modules]\n"
        "    assert not loaded, (arguments, loaded)\n"
        "for first in ('--help', '--version'):\n"
        f"    show([first], {(*HEAVY, 'pydantic')!r})\n"
        # typer itself loads pydantic when it has come as far as a command
        f"for command in {commands!r}:\n"
        f"    show([command, '--help'], {HEAVY!r})\n"
        f"show(['plan', {str(CONFIG)!r}], ('torch', 'vllm', 'transformers'))\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'kernels'}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    for name in commands:
        assert f"Usage: nwor-bench {name} " in done.stdout
    assert f"nwor-bench {__version__}" in done.stdout


def test_no_command_shows_the_help_and_is_bad_usage(command_line: Run) -> None:
    code, out, err = command_line()
    assert code == ExitCode.BAD_USAGE
    assert all(command in out + err for command in ("sweep", "report", "plan", "list"))


def test_output_fits_80_columns(command_line: Run) -> None:
    code, out, err = command_line(*TINY, "--dry-run")
    assert (code, err) == (0, "")
    assert "2 blocks x 7 cells" in out
    assert widest(out) <= 80


def test_a_report_is_made_again_from_the_records_of_a_copied_run(
    command_line: Run, engine: FakeEngine
) -> None:
    code, out, err = command_line(*TINY, "--output", "run", "--seed", "4")
    assert (code, err) == (0, "")
    written = {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    made = {"cells.csv", "batches.csv", "windows.csv", "report.md", "report.html"}
    assert made | {"run.json", "records.jsonl"} <= set(written)
    folder = Path(shutil.copytree("run", "elsewhere/run"))
    for name in made:
        (folder / name).unlink()
    code, again, _ = command_line("report", "elsewhere/run")
    assert code == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    assert out.endswith(again.replace("elsewhere/", ""))  # the summary on the terminal, too


def test_a_broken_run_ends_with_3_and_so_does_its_report(
    command_line: Run, engine: FakeEngine
) -> None:
    engine.wrong = lambda number, cell: cell.label == "stage x off"
    code, out, _ = command_line(*TINY, "--output", "run")
    assert code == ExitCode.CORRECTNESS_BROKEN
    assert "INVALID" in out
    assert command_line("report", "run")[0] == ExitCode.CORRECTNESS_BROKEN


@pytest.mark.parametrize("batches", ["0", "2"])
@pytest.mark.parametrize(
    ("modes", "gate", "badge", "why"),
    [
        (
            "off,stage",
            "0 of 5 cells",
            "NOTHING STAGED",
            "no draft token was staged (most often: cache_dtype:fp8)",
        ),
        ("off", "0 of 2 cells", "INEFFECTIVE", "it cannot run without CUDA"),
    ],
)
def test_a_run_in_which_nothing_acted_ends_with_5_and_its_reason(
    command_line: Run,
    engine: FakeEngine,
    batches: str,
    modes: str,
    gate: str,
    badge: str,
    why: str,
) -> None:
    engine.direct, engine.scv_fallback = "cache_dtype:fp8", "no_cuda"
    asked = ("--batches", batches, "--nwor-modes", modes)
    code, out, _ = command_line(*TINY, *asked, "--output", "run")
    said = " ".join(out.split())
    assert code == ExitCode.INCONCLUSIVE
    assert f"{badge}: " in said
    assert f"why {why} " in said
    assert "IDENTICAL" not in said
    assert f"gate: {gate} acted" in said
    assert f"{badge}: " in Path("run/report.md").read_text()
    code, told, _ = command_line("report", "run", "--json")
    assert (code, json.loads(told)["answer"]["badge"]) == (ExitCode.INCONCLUSIVE, badge)


def test_off_beside_itself_is_no_check_but_may_be_timed(
    command_line: Run, engine: FakeEngine
) -> None:
    only_off = (*TINY, "--nwor-modes", "off", "--scv-modes", "off", "--output")
    code, out, _ = command_line(*only_off, "checked", "--batches", "0")
    assert code == ExitCode.INCONCLUSIVE
    assert "NOTHING COMPARED: Only off x off ran" in out
    assert "gate: 0 of 0" not in out
    assert command_line(*only_off, "timed", "--batches", "2")[0] == 0


def test_only_cells_that_acted_are_counted_and_the_others_named(
    command_line: Run, engine: FakeEngine
) -> None:
    engine.scv_fallback = "no_cuda"
    code, out, _ = command_line(*TINY, "--batches", "0", "--output", "run")
    said = " ".join(out.split())
    assert code == 0
    assert "gate: 1 of 5 cells acted and passed the checks against off x off" in said
    assert "OUTPUT IDENTICAL: Checked cells (1 of 5) gave off x off's tokens" in said
    others = "off x graph, off x adaptive, stage x graph and stage x adaptive"
    assert f"unchecked {others}: it cannot run without CUDA" in said
    assert " no check " not in said  # their rows are in the report


def test_ctrl_c_on_a_cpu_prints_no_tokens_per_second(command_line: Run, engine: FakeEngine) -> None:
    engine.failing[25] = KeyboardInterrupt()
    code, out, _ = command_line(*TINY, "--batches", "5", "--output", "run")
    assert code == ExitCode.INTERRUPTED
    assert any(batch.phase == "timed" for batch in read_run(Path("run")).batches)
    assert "okens/s" not in out


def ctrl_c_is_caught_at(call: int) -> Callable[[int], None]:
    def press(number: int) -> None:
        if number == call:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    return press


def test_ctrl_c_that_makes_a_library_fail_is_still_ctrl_c(
    command_line: Run, engine: FakeEngine
) -> None:
    """Seen in vLLM's pool of tokenizers, whose `finally` met a variable that was not yet there."""
    engine.before = ctrl_c_is_caught_at(9)
    engine.failing[9] = UnboundLocalError("cannot access local variable 'tok'")
    code, out, _ = command_line(*TINY, "--output", "run")
    assert code == ExitCode.INTERRUPTED
    assert "interrupted: keeping what was measured" in out
    assert "'tok'" not in out
    assert command_line("report", "run")[0] == 0


def test_ctrl_c_before_anything_was_measured_says_so(
    command_line: Run, engine: FakeEngine, run_with: Callable[..., None]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run_with(check_engine=interrupt)
    code, _, err = command_line(*TINY, "--output", "run")
    assert (code, err) == (ExitCode.INTERRUPTED, "nwor-bench: interrupted\n")
    assert not Path("run").exists()


def test_a_failing_engine_ends_with_1_in_one_line(command_line: Run, engine: FakeEngine) -> None:
    from nwor_bench.errors import EngineError

    engine.failing[9] = EngineError("vLLM stopped answering")
    code, _, err = command_line(*TINY, "--output", "run")
    assert (code, err) == (ExitCode.FAILED, "nwor-bench: vLLM stopped answering\n")


def test_the_package_runs_as_a_module() -> None:
    """`python -m nwor_bench`, where the command is not on the path; its help names the command."""
    command = [sys.executable, "-m", "nwor_bench", "sweep", "--help"]
    found = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "Usage: nwor-bench sweep" in found.stdout


# vLLM's names for our flags, and the user's own prompts.


def test_vllms_names(command_line: Run) -> None:
    flags = "--num-prompts 3 --num-speculative-tokens 2 --kv-cache-dtype fp8 --batches 1"
    code, _, err = command_line("sweep", "--pair", "tiny", *flags.split(), "--output", "run")
    assert (code, err) == (0, "")
    spec = read_run(Path("run")).header.spec
    scenario = spec.scenario or {}
    assert (scenario["requests"], scenario["draft_tokens"]) == (3, 2)
    assert spec.engine_args == {"kv_cache_dtype": "fp8"}


def test_a_model_that_the_hub_does_not_give(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a network it would be asked for five times, for 45 seconds in all.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = command_line("sweep", "--model", "no/where")
    assert code == ExitCode.BAD_USAGE
    assert "--model: 'no/where'" in err


def test_both_ways_to_say_the_same() -> None:
    spec = resolve(load_scenario("short"), cache_dtype="fp8", engine_args={"kv_cache_dtype": "fp8"})
    assert spec.engine_args == {"kv_cache_dtype": "fp8"}


def write(path: str, *rows: object) -> None:
    Path(path).write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_own_prompts_with_the_scenarios_other_values(command_line: Run, engine: FakeEngine) -> None:
    write("mine.jsonl", {"prompt": "What is a cache?"}, {"text": "Why?"}, {"text": "How long?"})
    engine.failing[9] = KeyboardInterrupt()
    code, _, _ = command_line(*TINY, "--output", "run", "--prompts", "mine.jsonl")
    assert code == ExitCode.INTERRUPTED
    header = read_run(Path("run")).header
    assert (header.scenario or {})["prompts"]["path"] == "mine.jsonl"
    used = {name for block in header.blocks or () for name in block.prompt_ids or ()}
    assert used <= {"line-1", "line-2", "line-3"}
    engine.failing.clear()
    assert command_line("sweep", "--resume", "run")[0] == 0
