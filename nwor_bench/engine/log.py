"""Send vLLM's messages to the run folder instead of the terminal."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_to_file(path: Path | None) -> Iterator[None]:
    """Send vLLM's log to `path` permanently, and all of stderr while inside.

    None changes nothing.
    """
    if path is not None:
        _log_vllm_to(path)
    with stderr_to_file(path):
        yield


@contextmanager
def stderr_to_file(path: Path | None) -> Iterator[None]:
    """Send stderr to `path` while inside; None changes nothing.

    Libraries below vLLM write to the file descriptor, so the descriptor is redirected.
    """
    if path is None:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def _log_vllm_to(path: Path) -> None:
    """A file handler in place of vLLM's own handlers, which it must not configure again."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    file_handler = logging.FileHandler(path)
    file_handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(file_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
