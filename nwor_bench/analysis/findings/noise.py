"""What the A/A arm, off x off against itself, says of a run's noise."""

from collections.abc import Iterator, Sequence

from nwor_bench.analysis.cell_data import REFERENCE
from nwor_bench.analysis.effects import WINDOWS, sham_windows
from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.records.cell import SWITCHED
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, Verdict


def noise_findings(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """The A/A arm, and what it says of the other cells."""
    arms = [cell for cell in cells if cell.arm == AA]
    compared = [cell for cell in cells if cell.arm != AA and cell.verdict != REFERENCE]
    if cells and not arms:
        yield _no_arm(run)
    for arm in arms:
        if arm.verdict == Verdict.INVALID:
            yield Finding(
                FindingKind.AA_DIFFERS,
                Severity.ERROR,
                f"off x off differs from itself: {arm.reason}. No cell's parity means anything.",
                "Look for what is not deterministic in the engine: other --engine-args, --dtype.",
                arm.label,
            )
        if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
            yield Finding(
                FindingKind.AA_DIFFERS,
                Severity.WARNING,
                f"off x off against itself came out {arm.verdict} ({_ratio(arm)}): one in twenty "
                f"runs does so by chance, more if something drifts.{_of_switching(run, arm)}",
                "Measure once more, on a quieter machine if it comes again.",
                arm.label,
            )
        floor = _floor(arm)
        drowned = [c for c in compared if _is_drowned(c, floor)]
        if floor is not None and drowned:
            names = ", ".join(cell.label for cell in drowned)
            yield Finding(
                FindingKind.NOISE_FLOOR,
                Severity.WARNING,
                f"The noise floor, {100 * floor:.2f} %, is above the effect of {names}.",
                "Add blocks (--batches, or --ci-width 0.5%): four times as many halve the floor.",
            )


def _no_arm(run: RunData) -> Finding:
    blocks = run.header.blocks or ()
    message = "The run has no A/A arm (off x off against itself), so its noise floor is not known."
    remedy = "Measure anew with this version: every sweep has one."
    if any(AA in label for block in blocks for label in block.order or ()):
        message = "The run ended before its A/A arm (off x off against itself) had its turn."
        remedy = "Go on with it: `nwor-bench sweep --resume` and its folder."
    return Finding(FindingKind.AA_MISSING, Severity.NOTE, message, remedy)


def _of_switching(run: RunData, arm: CellResult) -> str:
    """What else such a ratio may mean if the arm's turns switched as those of stage do."""
    if arm.interleaved != WINDOWS or not sham_windows(run)[SWITCHED]:
        return ""
    return " Its turns switch as those of stage do, so switching itself may bias every ratio."


def _floor(arm: CellResult) -> float | None:
    low, high = arm.ratio_ci_low, arm.ratio_ci_high
    return None if low is None or high is None else max(abs(low - 1), abs(high - 1))


def _is_drowned(cell: CellResult, floor: float | None) -> bool:
    ratio = cell.ratio_to_off
    return (
        floor is not None
        and ratio is not None
        and cell.verdict == Verdict.AMBIGUOUS
        and abs(ratio - 1) <= floor
    )


def _ratio(cell: CellResult) -> str:
    return f"{cell.ratio_to_off:.4f} [{cell.ratio_ci_low:.4f}, {cell.ratio_ci_high:.4f}]"
