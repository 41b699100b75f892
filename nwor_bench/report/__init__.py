"""Reports of a run, made from its records and summaries alone."""

from nwor_bench.report.console import cells_table, details_table, print_summary
from nwor_bench.report.files import ReportPaths, write_files

__all__ = ["ReportPaths", "cells_table", "details_table", "print_summary", "write_files"]
