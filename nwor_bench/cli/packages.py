"""The packages that nwor-bench needs, by its own metadata. Imports only the standard library."""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires

from nwor_bench.errors import ConfigError

_MODULES = {"nvidia-ml-py": "pynvml"}
"""Modules of packages that have another name."""


def requirements() -> Iterator[tuple[str, str]]:
    """Each requirement as pip takes it, and the module that it brings; those of extras left out."""
    try:
        lines = requires("nwor-bench") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
            yield requirement.strip(), _MODULES.get(name, name.replace("-", "_"))


def missing_packages() -> dict[str, str]:
    """Requirements whose module cannot be imported, and why."""
    found = {}
    for requirement, module in requirements():
        try:
            import_module(module)
        except ImportError as error:
            found[requirement] = str(error)
    return found


def install_command(missing: Iterable[str]) -> str:
    """The line that installs them."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in missing)


def missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """The refusal for a module of one of our requirements; None for any other module."""
    name = (error.name or "").partition(".")[0]
    for requirement, module in requirements():
        if module == name:
            remedy = f"write {install_command([requirement])}; nwor-bench doctor checks all"
            return ConfigError.at(f"package {name}", f"is not installed; {remedy}", joint=" ")
    return None
