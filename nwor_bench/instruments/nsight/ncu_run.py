"""Run Nsight Compute around a sweep; where its report lies, and the run that was measured."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight.ncu_cells import run_folders
from nwor_bench.instruments.nsight.ncu_command import REPORT
from nwor_bench.instruments.nsight.report_files import ending, make_room
from nwor_bench.instruments.nsight.tools import run_tool


def run_profile(command: Sequence[str], report: Path) -> tuple[Path, Path | None]:
    """Profile a sweep: its report, and the folder of the sweep's last run if it made one.

    What lies at `report` from earlier is removed first, so that it is not taken for this run's.

    Raises KeyboardInterrupt after Ctrl-C; ConfigError where it fails: no report, no numbers.
    """
    make_room(report, REPORT)
    written, earlier = ending(report, REPORT), run_folders()
    code = run_tool(command)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code or not written.is_file():
        what = f"ended with exit code {code}" if code else "wrote no report"
        raise ConfigError(
            f"profile ncu: it {what}; its messages above say why. Without permission for the "
            "counters run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    return written, max(run_folders() - earlier, default=None)  # names begin with the time
