"""vLLM's log goes to the run folder; the terminal is given back."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nwor_bench.engine.arguments import log_to_file
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.records.types import Cell, NworMode, ScvMode


@pytest.fixture(autouse=True)
def vllm_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """vLLM's logger as it was, whatever a test does to it."""
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    logger = logging.getLogger("vllm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    logger.propagate = True
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


def stderr_is() -> tuple[int, int]:
    found = os.fstat(2)
    return found.st_dev, found.st_ino


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_and_what_libraries_write_go_to_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Messages also afterwards; the descriptor is given back."""
    log = tmp_path / "engine.log"
    with log_to_file(log):
        os.write(2, b"from C\n")
        print("from Python", file=sys.__stderr__, flush=True)
        logging.getLogger("vllm.engine").info("while it starts")
    os.write(2, b"after\n")
    logging.getLogger("vllm.engine").warning("while it runs")
    text = log.read_text()
    assert text.startswith("from C\n")
    assert "INFO vllm.engine: while it starts" in text
    assert "WARNING vllm.engine: while it runs" in text
    assert capfd.readouterr() == ("", "after\n")
    assert caplog.records == []  # nor to the root logger's handlers
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "0"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_stderr_comes_back_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with log_to_file(tmp_path / "engine.log"):
            assert stderr_is() != before
            raise error

    before, descriptors = stderr_is(), open_descriptors()
    with pytest.raises(error):
        fail()
    assert stderr_is() == before
    # The file handler stays open, and nothing else.
    assert open_descriptors() == descriptors + 1


def test_a_second_log_takes_over(tmp_path: Path, vllm_logger: logging.Logger) -> None:
    with log_to_file(tmp_path / "check.log"):
        vllm_logger.info("checking")
    (first,) = vllm_logger.handlers
    assert isinstance(first, logging.FileHandler)
    with log_to_file(tmp_path / "engine.log"):
        vllm_logger.info("starting")
    assert first.stream is None  # closed
    vllm_logger.info("later")
    assert len(vllm_logger.handlers) == 1
    assert "later" not in (tmp_path / "check.log").read_text()
    assert "later" in (tmp_path / "engine.log").read_text()


def test_without_a_file_nothing_is_touched(vllm_logger: logging.Logger) -> None:
    before, handlers = stderr_is(), list(vllm_logger.handlers)
    with log_to_file(None):
        assert stderr_is() == before
    assert vllm_logger.handlers == handlers
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"


def test_progress_bars_of_a_switch_stay_out_of_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a GPU: the first switch to stage captures CUDA graphs, with a bar for each."""
    engine = object.__new__(VllmEngine)
    engine._log = tmp_path / "engine.log"
    monkeypatch.setattr(engine, "_rpc", lambda *asked: os.write(2, b"Capturing: 100 %\n"))
    engine.set_modes(Cell("tiny", NworMode.STAGE, ScvMode.OFF))
    assert capfd.readouterr().err == ""
    assert engine._log.read_text() == "Capturing: 100 %\n"
