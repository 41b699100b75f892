"""/metrics while a sweep runs and while vLLM serves: real processes, real HTTP, counters rising."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.pairs.tiny import generate_tiny

pytestmark = pytest.mark.engine

CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 180
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what an earlier engine left in it, and with the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    path = f"{CHECKOUT}:{CHECKOUT / 'kernels'}"
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **extra,
    }


@contextmanager
def process(command: list[str], log: Path, **extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone when the block ends."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**extra)
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(60)


def wait_for(
    child: subprocess.Popen[bytes], log: Path, what: str, ready: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        assert child.poll() is None, f"{what}: the process has ended\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{what}: not in {START_S} s\n{log.read_text()[-4000:]}"
        time.sleep(0.2)


def read_metrics(address: str) -> dict[str, float]:
    """Sums over all labels, by sample name; parsed by the client's own parser."""
    text = urlopen(address, timeout=30).read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_a_sweep_serves_its_counters_while_it_runs(tmp_path: Path, pair_cache: Path) -> None:
    flags = ("--requests", "2", "--batches", "3", "--max-new-tokens", "24", "--seed", "5")
    sweep = ["sweep", "--pair", "tiny", *flags, "--output", str(tmp_path / "run")]
    main = "from nwor_bench.cli import main; main()"
    command = [sys.executable, "-c", main, *sweep, "--prometheus-port", "0"]
    log = tmp_path / "out.txt"
    marker = "metrics: http://localhost:"
    with process(command, log, NWOR_BENCH_CACHE=str(pair_cache)) as child:
        wait_for(child, log, "the port", lambda: marker in log.read_text())
        address = next(line for line in log.read_text().splitlines() if marker in line)
        address = address.removeprefix("metrics: ")
        seen: list[float] = []

        def has_risen_twice() -> bool:
            windows = read_metrics(address).get("nwor_windows_total", 0.0)
            if not seen or windows > seen[-1]:
                seen.append(windows)
            return len(seen) > 2

        wait_for(child, log, "rising counters", has_risen_twice)
        last = read_metrics(address)
        assert child.wait(START_S) == 0
    assert seen[1] > seen[0]
    assert last["nwor_draft_tokens_total"] >= last["nwor_accepted_tokens_total"] > 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "complete"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_tiny(tmp_path_factory.mktemp("pair"), noise=0.05)[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(target: Path, log: Path, **extra: str) -> Iterator[str]:
    """vLLM's API server, as `vllm serve` starts it: engine core and worker are other processes.

    The command `vllm` of the CPU build looks for a distribution called vllm and fails.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--block-size", "32", "--kv-cache-memory-bytes", "20000000", "--enforce-eager"),
        *("--speculative-config", json.dumps(NGRAM)),
    ]
    base = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            return bool(urlopen(f"{base}/health", timeout=5).status == 200)
        except (URLError, ConnectionError):
            return False

    with process(command, log, **extra) as child:
        wait_for(child, log, "the server", is_up)
        yield base


def complete(base: str, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    request = Request(
        f"{base}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return str(json.loads(urlopen(request, timeout=60).read())["choices"][0]["text"])


@pytest.mark.parametrize("several_servers", [False, True], ids=["one server", "vLLM's own folder"])
def test_vllm_serves_our_counters_beside_its_own(
    target: Path, tmp_path: Path, several_servers: bool
) -> None:
    """`several_servers`: the folder that vLLM makes for several API servers."""
    extra = {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "off"}
    if several_servers:
        extra["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    with server(target, tmp_path / "log.txt", **extra) as base:
        address = f"{base}/metrics"
        assert read_metrics(address)["nwor_windows_total"] == 0
        complete(base, "one two one two one two one two")
        first = read_metrics(address)
        complete(base, "three four three four three four")
        second = read_metrics(address)
    for name in ("nwor_windows_total", "nwor_total_staged_total", "nwor_stage_operations_total"):
        assert 0 < first[name] < second[name]
    for samples in (first, second):
        drafts = samples["vllm:spec_decode_num_draft_tokens_total"]
        accepted = samples["vllm:spec_decode_num_accepted_tokens_total"]
        assert samples["nwor_draft_tokens_total"] == samples["nwor_total_staged_total"] == drafts
        assert samples["nwor_accepted_tokens_total"] == accepted
        assert samples["nwor_total_committed_total"] == accepted
        assert samples["nwor_acceptance_rate"] == pytest.approx(accepted / drafts)
