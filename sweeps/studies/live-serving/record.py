r"""Record `nwor-bench live` beside a server under load: live.cast, which asciinema plays.

    python sweeps/studies/live-serving/record.py --pair tiny --most 4 --input 64 --tokens 64 \
      --flags "--kv-cache-memory-bytes 200000000 --enforce-eager --block-size 32" --output DIR

Takes the flags of measure.py, whose server and load it uses.
"""

import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

from measure import arguments_of, bench, server

from nwor_bench.models.pairs import resolve_pair

COLUMNS, LINES = 80, 24
REQUESTS = 400
HEADER = {"version": 2, "width": COLUMNS, "height": LINES, "title": "nwor-bench live"}


def record(command: list[str], cast: Path) -> int:
    """Run a command in a terminal of its own and write what it shows, with its times."""
    began = time.monotonic()
    size = {"COLUMNS": f"{COLUMNS}", "LINES": f"{LINES}", "TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | size
    )
    os.close(theirs)
    with cast.open("w", encoding="utf-8") as file:
        file.write(json.dumps(HEADER) + "\n")
        while shown := _read(ours):
            event = [round(time.monotonic() - began, 2), "o", shown.decode(errors="replace")]
            file.write(json.dumps(event) + "\n")
    return child.wait()


def _read(terminal: int) -> bytes:
    """The output read; empty once the command has ended (an error on Linux)."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def main() -> None:
    """Start the server, load it, record."""
    arguments = arguments_of(__doc__)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pair = resolve_pair(arguments.pair)
    with server(pair, arguments, "interleave") as started:
        started.wait()
        loaded = (started.base, pair, arguments, float("inf"), REQUESTS, 0)
        load = threading.Thread(target=bench, args=loaded, daemon=True)
        load.start()
        command = [sys.executable, "-m", "nwor_bench", "live", started.base]
        command += ["--time-budget", "60s"]
        print("exit code", record(command, arguments.output / "live.cast"))


if __name__ == "__main__":
    main()
