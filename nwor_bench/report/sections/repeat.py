"""The command that repeats a run, if there is one that does that and nothing else."""

import shlex

from nwor_bench.report.document import Block, Code, Paragraph

_OF_MANY_RUNS = ("--file", "--resume")
"""Flags whose command does not measure this run alone, or refuses because the run is there."""


def repeat_block(command: str | None) -> Block:
    """The command without this run's folder, which is taken; a sentence where none is known."""
    if not command:
        return Paragraph("The command was not recorded.")
    words = _split(command)
    if any(word.split("=")[0] in _OF_MANY_RUNS for word in words):
        return Paragraph(
            "This run's own command was not recorded: it began as part of a sweep file or was "
            "resumed. Its settings stand under Configuration."
        )
    return Code(_without_output(words) if "--output" in command else command)


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # not a command line that nwor-bench wrote
        return [command]


def _without_output(words: list[str]) -> str:
    kept, skip = [], False
    for word in words:
        if not skip and word.split("=")[0] != "--output":
            kept.append(word)
        skip = word == "--output"
    return shlex.join(kept)
