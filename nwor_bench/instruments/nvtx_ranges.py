"""NVTX ranges in a profiler's timeline; off unless a profiler listens or they are switched on.

All ranges are in the domain `nwor-bench`, under registered strings, so that
`nsys --nvtx-capture batch@nwor-bench` and `ncu --nvtx --nvtx-include nwor-bench@window/` find
them. A range's category is its cell (`stage x graph`), its payload one whole number:

| range | around | payload |
| --- | --- | --- |
| sweep | all work of a run on its engine | batches planned |
| block | one timed block: every cell once, after warm-up and gate | block number, from 1 |
| cell | one cell in a block: mode switch and batch | place in the block's order |
| batch | one `generate` | batch number in batches.csv |
| window | a step with drafts, from its forward to the next drafts | window number in windows.csv |
| forward | the target's forward | tokens of the step |
| stage | staging one layer's K/V (absent inside a full CUDA graph) | draft tokens |
| sample | vLLM's sampler | requests of the step |
| mask | the acceptance mask (absent if the commit computes it) | draft tokens |
| commit | the commit of all layers | draft tokens |
| draft | the drafter's next proposal | requests of the step |

The first four come from the harness, the others from the worker. They nest inside vLLM's own
scopes (VLLM_NVTX_SCOPES_FOR_PROFILING=1, domain `NVTX`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from nwor_bench.errors import ConfigError

DOMAIN = "nwor-bench"
NVTX_VARIABLE = "VLLM_NWOR_NVTX"
"""1: ranges on; 0: off, even under a profiler; unset: on under a profiler."""

PROFILERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Environment variables that a profiler sets for the process it profiles."""

HarnessRange = Literal["sweep", "block", "cell", "batch"]


class Ranges:
    """Pushes and pops ranges of one NVTX domain; one object per process.

    Args:
        domain: the domain from `nvtx.get_domain`; it does nothing unless a tool listens.
    """

    def __init__(self, domain: Any):
        self._domain = domain

    def push(self, name: str, payload: int, category: str | None = None) -> None:
        """Open a range inside the currently open one."""
        attributes = self._domain.get_event_attributes(
            message=name, category=category, payload=payload
        )
        self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the last opened range."""
        self._domain.pop_range()

    @contextmanager
    def span(self, name: str, payload: int, category: str | None = None) -> Iterator[None]:
        """A range around a block of code, closed even after an exception."""
        self.push(name, payload, category)
        try:
            yield
        finally:
            self.pop()


def span(
    ranges: Ranges | None, name: str, payload: int, category: str | None = None
) -> AbstractContextManager[None]:
    """A range around a block of code; does nothing if ranges are off."""
    return nullcontext() if ranges is None else ranges.span(name, payload, category)


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """True if ranges are on: by VLLM_NWOR_NVTX or, if that is unset, under a profiler.

    Raises ConfigError if VLLM_NWOR_NVTX is neither 0 nor 1.
    """
    switch = environ.get(NVTX_VARIABLE, "")
    if switch not in ("", "0", "1"):
        raise ConfigError.for_field(NVTX_VARIABLE, switch, "write 1 for ranges, 0 for none")
    return switch == "1" or (not switch and _profiled(environ))


def _profiled(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in PROFILERS)


def open_ranges(environ: Mapping[str, str] = os.environ) -> Ranges:
    """Ranges of our domain. Raises ConfigError if the package nvtx does not load."""
    try:
        import nvtx
    except ImportError as error:
        raise ConfigError.for_field(
            NVTX_VARIABLE, "1", f"the package nvtx does not load ({error}); pip install nvtx"
        ) from error
    domain = nvtx.get_domain(DOMAIN)
    if _profiled(environ) and not isinstance(domain, nvtx.Domain):
        domain = _open_for_an_old_tool(nvtx.Domain)
    return Ranges(domain)


def _open_for_an_old_tool(domain_type: Any) -> Any:
    """Our domain for tools with an older NVTX payload extension (seen: Nsight Systems 2023.4).

    With such a tool `nvtxDomainIsEnabled` returns 0 for every domain, so the package nvtx returns a
    domain that does nothing and the profile has no ranges. The tool does record pushes and pops.
    """
    try:
        from nvtx._lib.lib import DomainHandle

        domain = object.__new__(domain_type)
        domain.handle = DomainHandle(DOMAIN)
        domain.__init__(DOMAIN)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError.at(
            "NVTX",
            f"the profiler is too old for this version of the package nvtx ({error}); "
            "use a newer profiler, or pip install nvtx==0.2.17",
        ) from error
    return domain


def ranges_if_wanted(environ: Mapping[str, str] = os.environ) -> Ranges | None:
    """Ranges of our domain if they are on, else None; nvtx is imported only if they are on.

    Raises ConfigError if NVTX_DISABLE is set although they are on.
    """
    if not wanted(environ):
        return None
    if disabled := environ.get("NVTX_DISABLE"):
        remedy = "it disables every range; unset it"
        raise ConfigError.for_field("NVTX_DISABLE", disabled, remedy)
    return open_ranges(environ)
