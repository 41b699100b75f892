"""What each known vLLM says of the plugin's names, and what an unknown one changed of it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from nwor_bench.instruments.vllm_contract.definition import Definition
from nwor_bench.instruments.vllm_contract.names import all_names
from nwor_bench.instruments.vllm_contract.source import VllmSource

Release = tuple[int, ...]

TRIED = ("0.31.0", "0.32.0")
"""Releases that the tests ran on. Of another one with a stored contract the source was read."""

_NAMED_IN_NOTE = 6
"""Changed names that one line lists; `Changes` has all of them."""


@dataclass(frozen=True)
class Contract:
    """The plugin's names as one vLLM defines them."""

    version: str
    """A release, such as "0.32.0"."""
    names: Mapping[str, Definition | None]
    """Each name's definition; None where this vLLM has no such name."""

    @classmethod
    def read(cls, version: str, root: Path) -> "Contract":
        """From source files; `root` is the folder that holds the package `vllm`."""
        source = VllmSource(root)
        return cls(version, {name: source.read(name) for name in all_names()})

    @classmethod
    def from_json(cls, text: str) -> "Contract":
        """The inverse of `to_json`."""
        stored = json.loads(text)
        names = {name: known and Definition(*known) for name, known in stored["names"].items()}
        return cls(stored["vllm"], names)

    def to_json(self) -> str:
        """One line a name."""
        lines = [f"  {json.dumps(name)}: {json.dumps(known)}" for name, known in self.names.items()]
        return f'{{"vllm": "{self.version}", "names": {{\n' + ",\n".join(lines) + "\n}}\n"


@dataclass(frozen=True)
class Changes:
    """What one contract changed of another."""

    version: str
    base: str
    names: int
    """Names of the contract."""
    changed: Mapping[str, str]
    """Each changed name and what changed: "gone", "new", "signature" or "body"."""

    def __str__(self) -> str:
        same = self.names - len(self.changed)
        line = f"vLLM {self.version}: {same} of {self.names} names as in {self.base}"
        if not self.changed:
            return line
        told = [
            f"{name.partition(':')[2]} ({how})"
            for name, how in sorted(self.changed.items(), key=lambda item: _ORDER.index(item[1]))
        ]
        more = len(told) - _NAMED_IN_NOTE
        rest = f" and {more} more" if more > 0 else ""
        return f"{line}; changed: {', '.join(told[:_NAMED_IN_NOTE])}{rest}"


_ORDER = ("gone", "signature", "body", "new")


def changes(of: Contract, base: Contract) -> Changes:
    """What a contract changed since another, by name."""
    both = base.names.keys() & of.names.keys()
    found = {
        name: _how(base.names[name], of.names[name])
        for name in base.names
        if name in both and base.names[name] != of.names[name]
    }
    return Changes(of.version, base.version, len(both), found)


def _how(before: Definition | None, after: Definition | None) -> str:
    if before is None or after is None:
        return "gone" if after is None else "new"
    return "signature" if before.signature != after.signature else "body"


@cache
def stored() -> Mapping[Release, Contract]:
    """The contracts of all known versions, the oldest first."""
    folder = files("nwor_bench.instruments.vllm_contract").joinpath("stored")
    texts = [file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".json")]
    contracts = [Contract.from_json(text) for text in texts]
    return dict(sorted((release_of(c.version), c) for c in contracts))


def known(version: str) -> bool:
    """True for a release with a stored contract, whatever its local build tag."""
    return any(version.partition("+")[0] == contract.version for contract in stored().values())


def tried(version: str) -> bool:
    """True for a release of TRIED, whatever its local build tag."""
    return version.partition("+")[0] in TRIED


def nearest(version: str) -> Contract:
    """The newest stored contract that is not newer than this version, else the oldest."""
    before = [c for release, c in stored().items() if release <= release_of(version)]
    return before[-1] if before else next(iter(stored().values()))


def release_of(version: str) -> Release:
    """The numbers of a version: (0, 33, 0) of "0.33.0rc1+cu130"; () where there are none."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
