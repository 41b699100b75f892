"""`nwor-bench doctor`: what this machine can measure, with a remedy for what it cannot.

Checks look at software, GPU, memory and profilers. The check of the hooks starts a tiny engine and
compares a staged batch with a stock one.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import BenchError, ConfigError, ExitCode, UnsupportedVllmError
from nwor_bench.instruments import contract
from nwor_bench.instruments.device import free_memory, is_cpu_build
from nwor_bench.instruments.nsight import NCU, NSYS, Profiler, ToolUnavailable, find_tool
from nwor_bench.instruments.versions import (
    REMEDY,
    installed,
    require_supported_vllm,
    supported,
    untried_version,
    vllm_version,
)
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.workload.options import Option

if TYPE_CHECKING:
    from nwor_bench.engine.protocol import BatchOutput, Engine
    from nwor_bench.records.facts import EngineStatus, GpuFacts
    from nwor_bench.report.document import Document

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "nwor_bench"

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21
"""Bit of the capability that the driver asks for (linux/capability.h)."""

PERMIT = (
    "run as root, start the container with --cap-add=SYS_ADMIN, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


HOOKS_PAIR = "tiny-ngram"
HOOKS_PROMPTS = [[65, *[70, 71, 72, 73] * 6], [66, *[80, 81, 82] * 8]]
"""Repeating bytes, so that prompt lookup always has drafts."""

HOOKS_TOKENS = 24


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    MISSING = "missing"
    """Not installed or not present."""
    WRONG = "wrong"
    """Present, but not usable."""


@dataclass(frozen=True)
class Check:
    """One check, and what to do if it failed."""

    name: str
    state: State
    found: str
    """The finding, in words."""
    remedy: str = ""
    """Empty if nothing is to be done."""
    needed: bool = False
    """True if a sweep cannot run without it."""

    def __post_init__(self) -> None:
        if self.state is not State.OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.state} and has no remedy")


@dataclass(frozen=True)
class DoctorOptions:
    """What is checked and printed."""

    no_engine: Annotated[bool, Option(
        "Start no engine; skips the check of the hooks.",
    )] = False  # fmt: skip
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags()
def doctor(options: DoctorOptions) -> None:
    """Check what this machine can measure: vLLM, hooks, GPU, profilers, memory.

    Starts a tiny engine to try the hooks (5 to 20 s; the first on a GPU: minutes).

    Exit codes: 0 a sweep can run, 2 it cannot.
    """
    import json

    from nwor_bench import __version__
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    _check_packages()
    if not options.no_engine and not options.quiet:
        typer.echo("starting a tiny engine to try the hooks ...", err=True)
    checks = examine(None if options.no_engine else check_hooks)
    if options.as_json:
        facts = {"nwor_bench": __version__, "can_sweep": can_sweep(checks)}
        typer.echo(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        from rich.console import Console

        from nwor_bench.report.terminal import print_document

        print_document(Console(), doctor_document(checks), quiet=options.quiet)
    if not can_sweep(checks):
        raise typer.Exit(ExitCode.BAD_USAGE)


def _check_packages() -> None:
    """Import what a sweep and a report need: other checks, and messages, need some of it too.

    Raises ConfigError with the packages that are missing and the line that installs them.
    """
    from nwor_bench.cli.command import install_command, missing_packages

    missing = missing_packages()
    if missing:
        why = "; ".join(f"{requirement} ({reason})" for requirement, reason in missing.items())
        problem = f"cannot be imported: {why}; write {install_command(missing)}"
        raise ConfigError.at("A sweep cannot run here: packages", problem, joint=" ")


def doctor_document(checks: Sequence[Check]) -> "Document":
    """Headline: can a sweep run? Then a row for each check; its remedy is a row below it."""
    from nwor_bench.report.document import Document, Headline, table

    rows = []
    for check in checks:
        rows.append((check.name, str(check.state), check.found))
        if check.remedy:
            rows.append(("", "", f"→ {check.remedy}"))
    found = table(("Check", "State", "Found"), rows, numbers_from=3)
    return Document("What this machine can measure", (Headline("", verdict(checks)), found))


def verdict(checks: Sequence[Check]) -> str:
    """One sentence: whether a sweep can run, and which checks failed."""
    failed = [check.name for check in checks if check.state is not State.OK]
    if not can_sweep(checks):
        stops = [check.name for check in checks if check.needed and check.name in failed]
        return f"A sweep cannot run here until these are fixed: {', '.join(stops)}."
    if not failed:
        return "A sweep can run here, and everything that nwor-bench measures can be measured."
    return f"A sweep can run here. Missing or wrong, but not needed for it: {', '.join(failed)}."


def can_sweep(checks: Iterable[Check]) -> bool:
    """True if every check that a sweep needs is ok."""
    return all(check.state is State.OK for check in checks if check.needed)


def examine(check_hooks: Callable[[], Check] | None = None) -> list[Check]:
    """All checks; those that a sweep needs come first.

    Args:
        check_hooks: starts a tiny engine and tries the hooks on it; None skips this check.
    """
    from nwor_bench.instruments import environment

    facts = environment.collect()
    gpus = facts.gpus or ()
    checks = [
        check_vllm(),
        check_torch(bool(gpus)),
        check_plugin(),
        check_gpu(gpus, facts.gpu_note),
        check_memory(),
    ]
    if check_hooks is not None:
        if can_sweep(checks):
            checks.append(check_hooks())
        else:
            what = "not tried: an engine needs a check above that failed"
            checks.append(Check("hooks", State.MISSING, what, "see above", needed=True))
    return [*checks, check_counters(bool(gpus)), check_nsight(NCU), check_nsight(NSYS)]


def check_vllm() -> Check:
    """Check for a vLLM version that the plugin supports."""
    try:
        found = require_supported_vllm()
    except UnsupportedVllmError:
        found = vllm_version() or ""
        state = State.WRONG if found else State.MISSING
        what = f"{found}, but the plugin supports {supported()}" if found else "not installed"
        return Check("vLLM", state, what, REMEDY, needed=True)
    tried = "" if untried_version() is None else " (not tried)"
    source = contract.installed_source()
    if source is None:
        build = "CPU build" if is_cpu_build() else "CUDA build"
        return Check("vLLM", State.OK, f"{found}{tried}, {build}", needed=True)
    lost = contract.losses(source)
    words = (f"{name} {answer}" for name, answer in contract.in_words(lost).items())
    what, remedy = f"{found}{tried}: {', '.join(words)}", "; ".join(contract.remedies(lost))
    state, needed = State.WRONG if lost else State.OK, contract.Feature.STAGING in lost
    return Check("vLLM", state, what, remedy, needed=needed or not lost)


def check_torch(has_gpu: bool) -> Check:
    """Check that PyTorch is installed and, on a machine with a GPU, sees it."""
    found = installed("torch")
    if found is None:
        return Check("torch", State.MISSING, "not installed", "make venv", needed=True)
    if not has_gpu or is_cpu_build():
        return Check("torch", State.OK, found, needed=True)
    import torch

    if torch.version.cuda is None:
        remedy = "install vLLM's CUDA build with its own torch: make clean venv DEVICE=cuda"
        return Check("torch", State.WRONG, f"{found}, built without CUDA", remedy, needed=True)
    what = f"{found}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        remedy = "install the driver that this CUDA needs, and check CUDA_VISIBLE_DEVICES"
        return Check("torch", State.WRONG, f"{what}, but it finds no GPU", remedy, needed=True)
    return Check("torch", State.OK, what, needed=True)


def check_plugin() -> Check:
    """Check that vLLM finds the plugin's entry point and loads it (`vllm serve` needs this)."""
    points = entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    if not points:
        remedy = "pip install --no-deps -e . in the checkout; until then vllm serve has no hooks"
        return Check("plugin", State.MISSING, f"no entry point in {PLUGIN_GROUP}", remedy)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        remedy = f"unset VLLM_PLUGINS, or add {PLUGIN} to it"
        return Check("plugin", State.WRONG, f"VLLM_PLUGINS={allowed} leaves it out", remedy)
    point = next(iter(points))
    try:
        point.load()
    except (ImportError, AttributeError, BenchError) as error:
        remedy = "install again: pip install --no-deps -e . in the checkout"
        return Check("plugin", State.WRONG, f"{point.value} does not load: {error}", remedy)
    return Check("plugin", State.OK, f"{point.value}, found by vLLM")


def check_gpu(gpus: "Sequence[GpuFacts]", note: str | None) -> Check:
    """The GPUs; vLLM's CUDA build needs one, its CPU build does not."""
    from nwor_bench.engine.memory import GIB

    if not gpus:
        if is_cpu_build():
            remedy = "run on a machine with an NVIDIA GPU: CPU timings say nothing about NWOR"
            return Check("GPU", State.MISSING, note or "none", remedy)
        remedy = "install the driver, start the container with --gpus all, or make venv DEVICE=cpu"
        return Check("GPU", State.MISSING, note or "none", remedy, needed=True)
    first = gpus[0]
    many = "" if len(gpus) == 1 else f"{len(gpus)} x "
    memory = first.memory_total_bytes
    size = "" if memory is None else f", {memory / GIB:.0f} GiB"
    what = (
        f"{many}{first.name}{size}, compute capability {first.compute_capability}, "
        f"driver {first.driver}"
    )
    if is_cpu_build():
        remedy = "install vLLM's CUDA build to use it: make clean venv DEVICE=cuda"
        return Check("GPU", State.WRONG, f"{what}; vLLM's CPU build does not use it", remedy)
    return Check("GPU", State.OK, what, needed=True)


def check_memory() -> Check:
    """Free memory for vLLM itself; weights and KV cache depend on the models."""
    from nwor_bench.engine.memory import GIB, RUNTIME_BYTES

    free = free_memory()
    least = RUNTIME_BYTES[free.where]
    place = "GPU" if free.where == "gpu" else "host"
    what = (
        f"{free.num_bytes / GIB:.1f} GiB free on the {place}; vLLM itself takes about "
        f"{least / GIB:.1f}, plus weights and KV cache"
    )
    if free.num_bytes < least:
        remedy = "end other processes, or use a machine with more memory"
        return Check("memory", State.WRONG, what, remedy, needed=True)
    return Check("memory", State.OK, what, needed=True)


def check_counters(has_gpu: bool) -> Check:
    """Check that this user may read the GPU's hardware counters, and CUPTI is there to do so."""
    name = "counters"
    if not has_gpu:
        return Check(name, State.MISSING, "no GPU", "see GPU")
    try:
        restricted = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
        status = PROCESS_STATUS.read_text()
    except OSError as error:
        what = f"the driver does not say who may read counters ({error.strerror})"
        return Check(name, State.MISSING, what, f"if a profiler is refused: {PERMIT}")
    if restricted and not _is_admin(status):
        return Check(name, State.WRONG, "for administrators only", PERMIT)
    if installed("cupti-python") is None:
        remedy = "pip install 'nwor-bench[counters]'; without it there is no --counters dram"
        return Check(name, State.MISSING, "the package cupti-python is not installed", remedy)
    who = "for administrators only, and this process is one" if restricted else "for every user"
    return Check(name, State.OK, f"{who}; cupti-python {installed('cupti-python')}")


def _is_admin(status: str) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def check_nsight(profiler: Profiler) -> Check:
    """Check that `ncu` or `nsys` is installed, runs, and is new enough."""
    try:
        path, found = find_tool(profiler)
    except ToolUnavailable as error:
        what, remedy = what_and_remedy(re.sub(r"^profile[^:]*: ", "", str(error)))
        state = State.MISSING if "is not installed" in what else State.WRONG
        return Check(profiler.name, state, what, remedy)
    return Check(profiler.name, State.OK, f"{profiler.product} {found}, {path}")


def check_hooks(start: "Callable[[Path], Engine] | None" = None) -> Check:
    """Start a tiny engine, run a batch in mode off and one in mode stage.

    Args:
        start: starts the engine, given a file for its log; None: the tiny pair on vLLM.
    """
    with TemporaryDirectory() as folder, ExitStack() as open_engine:
        log = Path(folder) / "engine.log"
        try:
            engine = open_engine.enter_context(closing((start or _start)(log)))
            return _try_hooks(engine)
        except BenchError as error:
            what, remedy = what_and_remedy(str(error))
            # Our own errors name a remedy; otherwise vLLM's log has the cause.
            if not remedy or (log.is_file() and not isinstance(error, ConfigError)):
                what, remedy = str(error), _remedy(log)
            return Check("hooks", State.WRONG, what, remedy, needed=True)


def _start(log: Path) -> "Engine":
    from nwor_bench.engine.engine import VllmEngine
    from nwor_bench.models.pairs import resolve_pair
    from nwor_bench.workload.config import load_scenario, resolve

    small = {"requests": len(HOOKS_PROMPTS), "max_new_tokens": HOOKS_TOKENS, "max_model_len": 256}
    spec = resolve(load_scenario("short"), **small, engine_args='{"enforce_eager": true}')
    return VllmEngine(resolve_pair(HOOKS_PAIR), spec, log)


def _try_hooks(engine: "Engine") -> Check:
    stock = _run(engine, NworMode.OFF)
    staged = _run(engine, NworMode.STAGE)
    status = engine.status()
    problem = _problem(stock, staged, status)
    if problem is not None:
        remedy = "run the tests of the hooks (make test-fast) and report what fails"
        return Check("hooks", State.WRONG, problem, remedy, needed=True)
    what = (
        f"{status.runner} runner, {status.target_layers} target layers: {len(staged.windows)} "
        f"windows staged, same tokens; engine start {status.start_seconds or 0:.0f} s"
    )
    return Check("hooks", State.OK, what, needed=True)


def _run(engine: "Engine", mode: NworMode) -> "BatchOutput":
    from nwor_bench.engine.protocol import Sampling

    greedy = Sampling(HOOKS_TOKENS, temperature=0.0, top_p=1.0, seed=0, ignore_eos=True)
    engine.set_modes(Cell(HOOKS_PAIR, mode, ScvMode.OFF))
    return engine.generate(HOOKS_PROMPTS, greedy)


def _problem(stock: "BatchOutput", staged: "BatchOutput", status: "EngineStatus") -> str | None:
    """The fault that the batches show; None if there is none."""
    if not stock.windows:
        return "the hooks saw no window, although the batch drafts"
    if not any(window.staged_tokens for window in staged.windows):
        reasons = {w.fallback_reason for w in staged.windows if w.fallback_reason}
        reason = status.staging_unavailable or ", ".join(sorted(reasons))
        return f"mode stage staged nothing: {reason or 'no reason given'}"
    if stock.token_ids != staged.token_ids:
        return "greedy tokens differ between off and stage"
    return None


def _remedy(log: Path) -> str:
    """A remedy that quotes the last error in vLLM's log."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    errors = [line.strip() for line in lines if "Error" in line]
    hint = f"vLLM's log says: {errors[-1][-300:]}" if errors else "vLLM's log says no more"
    return f"{hint}; `nwor-bench sweep --pair tiny --verbose` shows all of it"


def what_and_remedy(message: str) -> tuple[str, str]:
    """An error message split at its semicolon: what is wrong, and what to do ('' if not given)."""
    what, _, remedy = message.partition("; ")
    return what, remedy
