"""A sweep's counters for Prometheus: served while it runs, or left in a textfile.

Both show the same numbers as the records: they grow with every batch that has been drained and
stored, warm-up and gate included. The form is the one of `vllm serve` under VLLM_NWOR_MODE.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import BatchRecord, WindowRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LOCALHOST = "127.0.0.1"
"""The default address of the metrics: only this machine can read them."""

OnBatch = Callable[[BatchRecord, Iterable[WindowRecord]], None]


class SweepMetrics:
    """The metrics of one command, over all of its runs.

    Args:
        folder: for the metric files.
        textfile: rewritten after every batch; None writes none.
    """

    def __init__(self, folder: Path, textfile: Path | None = None):
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        from nwor_bench.records.metrics import MetricFiles, WindowMetrics, process_name

        self._files = MetricFiles(folder, process_name(rank=0))
        self._windows = WindowMetrics(self._files)
        self._textfile = textfile
        self.registry: CollectorRegistry = CollectorRegistry()
        MultiProcessCollector(self.registry, str(folder))  # type: ignore[no-untyped-call]

    def batch_done(self, batch: BatchRecord, windows: Iterable[WindowRecord]) -> None:
        """Count a batch's windows, and write the textfile anew."""
        from nwor_bench.records.metrics import labels_of

        # A sweep drains rank 0; the other ranks' counts are the same.
        labels = labels_of(batch.pair, batch.nwor_mode, batch.scv_mode, rank=0)
        self._windows.begin(labels)
        for window in windows:
            self._windows.add(window, labels)
        self.write()

    def write(self) -> None:
        """Replace the textfile, at one stroke, by what is counted now.

        Raises ConfigError if it cannot be written: at once, or in the midst of a run.
        """
        if self._textfile is None:
            return
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(self._textfile), self.registry)
        except OSError as error:
            raise ConfigError.for_field(
                "--prometheus-textfile",
                str(self._textfile),
                f"{error.strerror}; name a file (NAME.prom) in a folder that exists and can be "
                "written",
            ) from error

    def close(self) -> None:
        """Close the metric files."""
        self._files.close()


@contextmanager
def sweep_metrics(
    port: int | None,
    textfile: Path | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> Iterator[OnBatch | None]:
    """Serve and write metrics while the block runs; yields None if neither is asked for.

    A dry run has none: the textfile there is another run's, and the port may be in use by it.

    Args:
        port: serve http://localhost:PORT/metrics; 0 picks a free port.
        textfile: for the textfile collector of Prometheus' node exporter.
        say: is called with the metrics' address.

    Raises:
        ConfigError: the port is taken or not allowed, or the file cannot be written.
    """
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError.for_field("--prometheus-port", port, "write 1 to 65535, or 0 for any")
    if dry_run or (port is None and textfile is None):
        yield None
        return
    with (
        TemporaryDirectory(prefix="nwor-metrics-") as folder,
        closing(SweepMetrics(Path(folder), textfile)) as metrics,
    ):
        metrics.write()
        stop = _serve(port, metrics.registry, say)
        try:
            yield metrics.batch_done
        finally:
            stop()
            metrics.write()


def _serve(
    port: int | None, registry: "CollectorRegistry", say: Callable[[str], None]
) -> Callable[[], None]:
    """Start serving; returns what ends it."""
    if port is None:
        return lambda: None
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, LOCALHOST, registry)
    except OSError as error:
        raise ConfigError.for_field(
            "--prometheus-port", port, f"{error.strerror}; write another port, or 0 for a free one"
        ) from error
    say(f"metrics: http://localhost:{server.server_port}/metrics")

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
