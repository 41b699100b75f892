"""Check the hooks: start a tiny engine with them, and compare a staged batch with a stock one."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from nwor_bench.cli.doctor_checks import Check, State, what_and_remedy
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput, Engine, Sampling
from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.types import Cell, NworMode, ScvMode

NAME = "hooks"
PAIR = "tiny-ngram"
SAMPLING = Sampling(max_new_tokens=24, temperature=0.0, top_p=1.0, seed=0, ignore_eos=True)
PROMPTS = [[65, *[70, 71, 72, 73] * 6], [66, *[80, 81, 82] * 8]]
"""Repeating bytes, so that prompt lookup always has drafts."""


def check_hooks(start: Callable[[Path], Engine] | None = None) -> Check:
    """Start a tiny engine, run a batch in mode off and one in mode stage.

    Args:
        start: starts the engine, given a file for its log; None: the tiny pair on vLLM.
    """
    with TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        try:
            engine = (start or _start)(log)
        except BenchError as error:
            return _failed(error, log)
        try:
            return _try_hooks(engine)
        except BenchError as error:
            return _failed(error, log)
        finally:
            engine.close()


def _start(log: Path) -> Engine:
    from nwor_bench.models.pairs import resolve_pair
    from nwor_bench.workload.config import load_scenario, resolve

    small = {"requests": len(PROMPTS), "max_new_tokens": 24, "max_model_len": 256}
    spec = resolve(load_scenario("short"), **small, engine_args='{"enforce_eager": true}')
    return VllmEngine(resolve_pair(PAIR), spec, log)


def _try_hooks(engine: Engine) -> Check:
    stock = _run(engine, NworMode.OFF)
    staged = _run(engine, NworMode.STAGE)
    status = engine.status()
    problem = _problem(stock, staged, status)
    if problem is not None:
        remedy = "run the tests of the hooks (make test-fast) and report what fails"
        return Check(NAME, State.WRONG, problem, remedy, needed=True)
    what = (
        f"{status.runner} runner, {status.target_layers} target layers: {len(staged.windows)} "
        f"windows staged, same tokens; engine start {status.start_seconds or 0:.0f} s"
    )
    return Check(NAME, State.OK, what, needed=True)


def _run(engine: Engine, mode: NworMode) -> BatchOutput:
    engine.set_modes(Cell(PAIR, mode, ScvMode.OFF))
    return engine.generate(PROMPTS, SAMPLING)


def _problem(stock: BatchOutput, staged: BatchOutput, status: EngineStatus) -> str | None:
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


def _failed(error: BenchError, log: Path) -> Check:
    """The failed check. Our own errors name a remedy; otherwise vLLM's log has the cause."""
    what, remedy = what_and_remedy(str(error))
    if remedy and (isinstance(error, ConfigError) or not log.is_file()):
        return Check(NAME, State.WRONG, what, remedy, needed=True)
    return Check(NAME, State.WRONG, str(error), _remedy(log), needed=True)


def _remedy(log: Path) -> str:
    """A remedy that quotes the last error in vLLM's log."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    errors = [line.strip() for line in lines if "Error" in line]
    hint = f"vLLM's log says: {errors[-1][-300:]}" if errors else "vLLM's log says no more"
    return f"{hint}; `nwor-bench sweep --pair tiny --verbose` shows all of it"
