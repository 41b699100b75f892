"""Fixtures of all tests. GPU tests are skipped if there is no CUDA device."""

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from file_tokenizer import FileTokenizer
from hypothesis import settings

# A shell makes its background jobs ignore Ctrl-C; some tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples of a property by make target (`--hypothesis-profile`); plain pytest runs all of them.
# No test is timed: on a busy machine any example may take longer than hypothesis' 200 ms.
for target, number in {"test-fast": 10, "test": 25, "test-all": 100}.items():
    settings.register_profile(target, deadline=None, max_examples=number)
settings.load_profile("test-all")

pytest_plugins = ["support_rows"]

# Processes side by side have a core each: threads of PyTorch, and those that vLLM binds to all
# cores, would wait for one that is not running.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


def pytest_sessionstart() -> None:
    """Remove OpenMP's entries of processes that are gone.

    Tests kill processes. One that is killed between creating its entry and filling it leaves an
    empty file, and the next process with the same number dies of SIGBUS reading it.
    """
    for entry in Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_*_{os.getuid()}"):
        if not Path("/proc", entry.name.split("_")[-2]).exists():
            entry.unlink(missing_ok=True)


@cache
def cuda_is_available() -> bool:
    """Ask PyTorch, and only when a GPU test is about to run: importing it takes seconds."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def pair_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of pairs for NWOR_BENCH_CACHE, so that the generated ones are built once."""
    return tmp_path_factory.mktemp("pairs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    on_gpu = item.get_closest_marker("gpu") is not None
    if on_gpu and not cuda_is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("engine") and not on_gpu and cuda_is_available():
        pytest.skip("needs vLLM's CPU build")


LEFT_OUT = re.compile(r"not (\w+)(?: and |$)")
FILE_MARKS = re.compile(r"^pytestmark = .*(?:\n[ \]].*)*", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file is not imported if `-m "not a and not b"` leaves out a mark that the whole file has.

    What such files import takes seconds in every process.
    """
    left_out = LEFT_OUT.findall(config.option.markexpr)
    if collection_path.suffix != ".py" or LEFT_OUT.sub("", config.option.markexpr) or not left_out:
        return None
    marks = FILE_MARKS.search(collection_path.read_text(encoding="utf-8"))
    if marks is None or not re.search(rf"mark\.({'|'.join(left_out)})\b", marks[0]):
        return None
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first: if files run in parallel, no slow one is left for the end."""
    long = {item.path for item in items if _takes_long(item)}
    items.sort(key=lambda item: item.path not in long)


def _takes_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("engine", "slow", "long"))


def pytest_collection() -> None:
    """Tests and their imports live to the end: there is no garbage to look for yet."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not searched again and again: a quarter of a second each
    gc.enable()
    for name in list(logging.root.manager.loggerDict):  # else each gets six handlers in each test
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


def pytest_sessionfinish() -> None:
    """Collect garbage once, so that its errors are shown; pytest would do it five times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """No fsync: on a busy disk it takes most of the time of some tests.

    test_store.py checks that records are synchronised.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def checkout_facts() -> dict[str, Any]:
    """Git facts of the checkout, asked once: it takes three processes."""
    from nwor_bench.instruments import environment

    return environment._git(Path(environment.__file__))


@pytest.fixture(scope="session")
def installed_version() -> Callable[[str], str | None]:
    """A package's version, read once: it takes ten files."""
    from nwor_bench.instruments.versions import installed

    return cache(installed)


@pytest.fixture
def figures_left_out() -> Iterator[None]:
    """Pages without their drawings."""
    from synthetic_run import without_figures

    with without_figures():
        yield


@pytest.fixture
def own_surroundings(
    pair_cache: Path,
    checkout_facts: dict[str, Any],
    installed_version: Callable[[str], str | None],
    figures_left_out: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command line in a folder of its own: tiny is built, nothing comes from outside.

    Transformers, whose import takes seconds, does not see tiny: test_refused_configs.py checks
    configurations that it refuses, test_pairs_tiny.py that its tokenizer gives our tokens.
    """
    from nwor_bench.instruments import environment
    from nwor_bench.run import prepare

    def check(pair: Any, real: Callable[[Any], None] = prepare.check_model_configs) -> None:
        if not pair.name.startswith("tiny"):
            real(pair)

    def load(target: str, real: Callable[[str], Any] = prepare.load_tokenizer) -> Any:
        return FileTokenizer(target) if Path(target).is_relative_to(pair_cache) else real(target)

    monkeypatch.setattr(prepare, "check_model_configs", check)
    monkeypatch.setattr(prepare, "load_tokenizer", load)
    monkeypatch.setattr(environment, "_git", lambda source: checkout_facts)
    monkeypatch.setattr(environment, "installed", installed_version)
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(pair_cache))
    monkeypatch.setenv("NWOR_BENCH_PRELOADED", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("TARGET_MODEL", "DRAFT_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`run_with(engine_factory=..., check_engine=...)` adds arguments to a command's `run_one`."""
    from nwor_bench.run import prepare

    def give(**arguments: Any) -> None:
        monkeypatch.setattr(prepare, "run_one", partial(prepare.run_one, **arguments))

    return give


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Command lines run on this stand-in instead of vLLM."""
    from fake_engine import FakeEngine, FakeFactory, accept_arguments

    from nwor_bench.run.prepare import resume_one, run_one
    from nwor_bench.run.sweep import run_loaded

    fake = FakeEngine()
    for function in (run_one, resume_one, run_loaded):
        monkeypatch.setitem(function.__kwdefaults__, "engine_factory", FakeFactory(fake))
        monkeypatch.setitem(function.__kwdefaults__, "check_engine", accept_arguments)
    return fake


@pytest.fixture(scope="session")
def built_command() -> Callable[[Any], Any]:
    """typer's `get_command`, once for each application: it reads every option's signature."""
    import typer

    return cache(typer.main.get_command)


@pytest.fixture
def command_line(
    built_command: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `nwor-bench` with the given arguments in this process: exit code, stdout, stderr."""
    from nwor_bench.cli import app as cli

    def invoke(*arguments: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["nwor-bench", *arguments])
            # Later tests of this process need transformers with PyTorch.
            patch.setattr("nwor_bench.engine.preload.import_transformers_alone", lambda: None)
            # Printing the help, as a group does without arguments, changes the command.
            if len(arguments) > 1 and not {"-h", "--help"}.intersection(arguments):
                patch.setattr("typer.main.get_command", built_command)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return invoke
