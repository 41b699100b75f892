"""A sweep's counters for Prometheus, served while it runs.

They grow with every batch that has been drained and stored, warm-up and gate included. The form is
the one of `vllm serve` under VLLM_NWOR_MODE.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import BatchRecord, WindowRecord

LOCALHOST = "127.0.0.1"
"""Only this machine can read the metrics."""

OnBatch = Callable[[BatchRecord, Iterable[WindowRecord]], None]


@contextmanager
def sweep_metrics(port: int | None, say: Callable[[str], None]) -> Iterator[OnBatch | None]:
    """Serve metrics of all runs of a command while the block runs; yields None without a port.

    Args:
        port: serve http://localhost:PORT/metrics; 0 picks a free port.
        say: is called with the metrics' address.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    if port is None:
        yield None
        return
    if not 0 <= port <= 65535:
        raise ConfigError.for_field("--prometheus-port", port, "write 1 to 65535, or 0 for any")
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    from nwor_bench.records.metrics import MetricFiles, WindowMetrics, labels_of, process_name

    def batch_done(batch: BatchRecord, windows: Iterable[WindowRecord]) -> None:
        # A sweep drains rank 0; the other ranks' counts are the same.
        labels = labels_of(batch.pair, batch.nwor_mode, batch.scv_mode, rank=0)
        counters.begin(labels)
        for window in windows:
            counters.add(window, labels)

    with TemporaryDirectory(prefix="nwor-metrics-") as folder:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        try:
            server, thread = start_http_server(port, LOCALHOST, registry)
        except OSError as error:
            remedy = f"{error.strerror}; write another port, or 0 for a free one"
            raise ConfigError.for_field("--prometheus-port", port, remedy) from error
        files = MetricFiles(Path(folder), process_name(rank=0))
        counters = WindowMetrics(files)
        say(f"metrics: http://localhost:{server.server_port}/metrics")
        try:
            yield batch_done
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            files.close()
