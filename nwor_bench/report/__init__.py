"""Reports of a run, made from its records and summaries alone.

What this exports is imported when it is asked for: pandas and scipy behind it take a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nwor_bench.report.console import cells_table, details_table, print_summary
    from nwor_bench.report.files import ReportPaths, write_files

__all__ = ["ReportPaths", "cells_table", "details_table", "print_summary", "write_files"]

_MODULES = {"ReportPaths": "files", "write_files": "files"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'console')}"), name)
