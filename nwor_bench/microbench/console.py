"""A kernel run on the terminal, in 80 columns: a table per kernel, then the goals."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nwor_bench.microbench import report
from nwor_bench.microbench.cases import L2, Group, LaunchMode, Spec, estimate_s
from nwor_bench.microbench.result import GoalResult, Result, Verdict
from nwor_bench.microbench.rows import Row, Status

_STYLES = {Verdict.MET: "green", Verdict.MISSED: "bold red", Verdict.UNCLEAR: "yellow"}


def print_result(
    console: Console, result: Result, files: Sequence[Path], *, quiet: bool = False
) -> None:
    """Print graph-captured cold rows and the goals; the files hold all rows.

    `quiet` leaves the goals, wrong results and the files.
    """
    if quiet:
        for reason in report.reasons(result.invalid):
            console.print(Text(reason, style="bold red"))
    else:
        _print_rows(console, result)
    if result.goals:
        console.print(_goals(result.goals))
    console.print(Text("Files: " + ", ".join(map(str, files))), soft_wrap=True)


def _print_rows(console: Console, result: Result) -> None:
    console.print(report.machine(result), highlight=False)
    shown = _shown(result.rows)
    for (kernel, dtype), rows in groupby(shown, lambda row: (row.kernel, row.cache_dtype)):
        name = kernel if kernel == "mask" else f"{kernel}, {dtype} cache"
        console.print(_table(f"{name} ({_state(shown)})", list(rows), result.rows))
    for reason in report.reasons(result.rows):
        console.print(Text(reason, style="bold red" if "INVALID" in reason else "dim"))


def plan_facts(spec: Spec, groups: Sequence[Group]) -> dict[str, Any]:
    """The groups that a run would time, and its expected time, for JSON."""
    seconds = [estimate_s(group, spec) for group in groups]
    return {
        "cases": len(groups) * len(spec.l2) * len(spec.launch),
        "expected_s": sum(seconds),
        "groups": [
            {"group": group.label, "expected_s": s}
            for group, s in zip(groups, seconds, strict=True)
        ],
    }


def print_plan(
    console: Console, spec: Spec, groups: Sequence[Group], *, quiet: bool = False
) -> None:
    """Print the groups that a run would time, and its expected time; `quiet` that alone."""
    if not quiet:
        console.print(_plan_table(spec, groups))
    cases = len(spec.l2) * len(spec.launch)
    total = sum(estimate_s(group, spec) for group in groups)
    states = f"L2 {', '.join(spec.l2)}; {', '.join(spec.launch)}"
    console.print(
        f"{len(groups) * cases} cases in {len(groups)} groups ({states}), about {total:.0f} s "
        "on an H200 once compiled. Nothing was measured.",
        highlight=False,
    )
    if spec.time_budget_s is not None and total > spec.time_budget_s:
        console.print(
            f"--time-budget {spec.time_budget_s:g}s is shorter: the last groups would be skipped.",
            highlight=False,
        )


def _plan_table(spec: Spec, groups: Sequence[Group]) -> Table:
    table = _new_table("kernel", "cache", "window", "accepted", "context", "cases", "about s")
    cases = len(spec.l2) * len(spec.launch)
    for group in groups:
        accepted = "" if group.acceptance is None else f"{group.acceptance:g}"
        table.add_row(
            group.kernel,
            "" if group.kernel == "mask" else group.cache_dtype,
            str(group.window),
            accepted,
            "" if group.context is None else str(group.context),
            str(cases),
            f"{estimate_s(group, spec):.1f}",
        )
    return table


def _shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of one L2 state and launch mode: graph-captured and cold if measured."""
    graph = [row for row in rows if row.launch is LaunchMode.GRAPH] or list(rows)
    return [row for row in graph if row.l2 is L2.COLD] or graph


def _state(rows: Sequence[Row]) -> str:
    return f"{rows[0].launch}, {rows[0].l2} L2"


def _table(title: str, rows: Sequence[Row], every: Sequence[Row]) -> Table:
    hosts = {_same(row): row.host_us_per_call for row in every if row.launch is LaunchMode.EAGER}
    table = _new_table(
        report.case_heading(rows).replace(", ", ",\n"), "implementation", "time us", "GB/s",
        "of\ncopy", "time/nwor\n[95 %]", "host\nus", left=2, title=title,
    )  # fmt: skip
    last = ""
    for row in rows:
        case = report.case(row)
        style = "bold red" if row.status is Status.INVALID else ""
        host = report.significant(hosts.get(_same(row)))
        name = row.implementation
        table.add_row("" if case == last else case, name, *report.numbers(row), host, style=style)
        last = case
    return table


def _same(row: Row) -> tuple[object, ...]:
    """Key shared by the rows of one implementation in one group and L2 state."""
    return (
        row.kernel, row.cache_dtype, row.requests, row.drafts, row.acceptance, row.context,
        row.implementation, row.l2,
    )  # fmt: skip


def _goals(goals: Sequence[GoalResult]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("goal", "", "cases", "worst time/nwor [95 %]"):
        table.add_column(name, overflow="fold")
    for each in goals:
        goal, verdict, met, worst = report.goal_cells(each)
        table.add_row(goal, Text(verdict, style=_STYLES.get(each.verdict, "")), met, worst)
    return table


def _new_table(*headers: str, left: int = 1, title: str | None = None) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        title=title, title_justify="left", title_style="bold",
    )  # fmt: skip
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < left else "right", no_wrap=True)
    return table
