"""vLLM's API servers and its load `vllm bench serve`, for studies that compare several servers."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

START_S = 400


@dataclass(frozen=True)
class Server:
    """vLLM's API server, which may still be starting."""

    base: str
    child: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.child.poll() is not None:
                raise SystemExit(f"the server ended; its log: {self.log}")
            try:
                with urlopen(f"{self.base}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"no server within {START_S} s; its log: {self.log}")


@contextmanager
def server(
    model: str, port: int, log: Path, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Server]:
    """Start one; the command `vllm`, which the CPU build lacks, does the same."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", str(port), *flags]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield Server(f"http://127.0.0.1:{port}", child, log)
        finally:
            child.terminate()
            child.wait(60)


def bench(base: str, flags: Sequence[str]) -> dict[str, Any]:
    """One load of `vllm bench serve`, whose command the CPU build lacks: its result."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    common = ["--base-url", base, "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    return dict(serve(parser.parse_args([*common, *flags])))
