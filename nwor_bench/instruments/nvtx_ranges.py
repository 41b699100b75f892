"""Named ranges in a profiler's timeline (NVTX), off unless somebody looks.

All ranges are pushed and popped in the domain `nwor-bench`, under registered strings, so that
`nsys --nvtx-capture batch@nwor-bench` and `ncu --nvtx --nvtx-include nwor-bench@window/` find
them. A range's category is its cell (`stage x graph`), its payload one whole number:

| range | around | payload |
| --- | --- | --- |
| sweep | everything that a run does on its engine | batches planned |
| block | one timed block, every cell once: after warm-up and gate | its number, from 1 |
| cell | one turn of a cell: mode switch and batch | place in the block's order |
| batch | one `generate` | the batch's number in batches.csv |
| window | a step with drafts, from its forward to the next drafts | its number in windows.csv |
| forward | the target's forward | tokens of the step |
| stage | one layer's K/V held back (none inside a full CUDA graph) | draft tokens |
| sample | vLLM's sampler | requests of the step |
| mask | deciding what was accepted (none where the commit decides) | draft tokens |
| commit | the commit of all layers | draft tokens |
| draft | the drafter's next proposal | requests of the step |

The first four come from the harness, the others from the worker; they nest, and lie inside
vLLM's own scopes (VLLM_NVTX_SCOPES_FOR_PROFILING=1, domain `NVTX`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from nwor_bench.errors import ConfigError

DOMAIN = "nwor-bench"
SWITCH = "VLLM_NWOR_NVTX"
"""1: ranges on; 0: off, under a profiler too; not set: on under a profiler."""

PROFILERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Variables that a profiler leaves in the environment of what it runs."""

HARNESS_RANGES = ("sweep", "block", "cell", "batch")


class Ranges:
    """Pushes and pops ranges of one NVTX domain; one object a process.

    Args:
        domain: what `nvtx.get_domain` returned: without a listening tool, one that does nothing.
    """

    def __init__(self, domain: Any):
        self._domain = domain

    def push(self, name: str, payload: int, category: str | None = None) -> None:
        """Open a range inside the one that is open."""
        attributes = self._domain.get_event_attributes(
            message=name, category=category, payload=payload
        )
        self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the range that was opened last."""
        self._domain.pop_range()

    @contextmanager
    def span(self, name: str, payload: int, category: str | None = None) -> Iterator[None]:
        """A range around a block of code, closed however the block ends."""
        self.push(name, payload, category)
        try:
            yield
        finally:
            self.pop()


def span(
    ranges: Ranges | None, name: str, payload: int, category: str | None = None
) -> AbstractContextManager[None]:
    """A range around a block of code; nothing at all where ranges are off."""
    return nullcontext() if ranges is None else ranges.span(name, payload, category)


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Are ranges on? By VLLM_NWOR_NVTX, and without it under a profiler.

    Raises ConfigError for a value that is neither 0 nor 1.
    """
    switch = environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ConfigError.for_field(SWITCH, switch, "write 1 for ranges, 0 for none")
    return switch == "1" or (not switch and _profiled(environ))


def _profiled(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in PROFILERS)


def open_ranges(environ: Mapping[str, str] = os.environ) -> Ranges:
    """The domain's ranges. Raises ConfigError if the package nvtx cannot be used."""
    try:
        import nvtx
    except ImportError as error:
        raise ConfigError.for_field(
            SWITCH, "1", f"the package nvtx does not load ({error}); pip install nvtx"
        ) from error
    domain = nvtx.get_domain(DOMAIN)
    if _profiled(environ) and not isinstance(domain, nvtx.Domain):
        domain = _open_for_an_old_tool(nvtx.Domain)
    return Ranges(domain)


def _open_for_an_old_tool(domain_type: Any) -> Any:
    """The domain although `nvtxDomainIsEnabled` says no.

    That question came with NVTX's payload extension. A tool with an older form of the extension
    (seen: Nsight Systems 2023.4) refuses it, the answer is then 0 for every domain, and nvtx hands
    out a domain that does nothing: profiles without a single range. The tool itself hears pushes
    and pops all the same; one that has the domain switched off ignores them.
    """
    try:
        from nvtx._lib.lib import DomainHandle

        domain = object.__new__(domain_type)
        domain.handle = DomainHandle(DOMAIN)
        domain.__init__(DOMAIN)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"NVTX: the profiler is too old for this version of the package nvtx ({error}); "
            "use a newer profiler, or pip install nvtx==0.2.17"
        ) from error
    return domain


def ranges_if_wanted(environ: Mapping[str, str] = os.environ) -> Ranges | None:
    """The domain's ranges where they are on, else None: then nvtx is not even imported."""
    return open_ranges(environ) if wanted(environ) else None


def switch_on() -> None:
    """Turn ranges on in this process and in those that it starts (`sweep --nvtx`).

    Raises ConfigError if NVTX is disabled by the environment or its package does not load.
    """
    if os.environ.get("NVTX_DISABLE"):
        raise ConfigError.for_field(
            "--nvtx", True, "NVTX_DISABLE is set, which silences every range; unset it"
        )
    open_ranges()
    os.environ[SWITCH] = "1"
