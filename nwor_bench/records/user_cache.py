"""The user's cache folder: built pairs, and what the plugin has timed."""

import os
from pathlib import Path


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The cache: `cache_dir`, else $NWOR_BENCH_CACHE, else $XDG_CACHE_HOME/nwor-bench or ~/.cache.

    The folder need not exist yet.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser().resolve()
    if folder := os.environ.get("NWOR_BENCH_CACHE"):
        return Path(folder).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "nwor-bench"
