"""Pages of /metrics as servers show them, and a small server that answers with them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nwor_bench.records.window_order import ALL

Ratio = tuple[float, float, float]
Counts = Mapping[int, tuple[float, float]]
"""By draft count: time of a window over k = 0, and tokens."""

OTHERS = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
some_odd_line{without="a value"}
"""
FASTER, SAME, SLOWER, UNSURE = (
    (0.97, 0.968, 0.972), (1.001, 0.997, 1.005), (1.04, 1.036, 1.044), (0.999, 0.96, 1.04),
)  # fmt: skip
PAYS: Counts = {1: (1.2, 1.6), 2: (1.4, 2.1)}
"""1.33 and 1.5 times the tokens/s."""
COSTS: Counts = {1: (2.0, 1.6), 2: (3.0, 2.1)}


class Samples:
    """Lines of one worker's samples."""

    def __init__(self, mode: str, scv_mode: str, rank: int = 0) -> None:
        self._base = f'nwor_mode="{mode}",pair="a + b",rank="{rank}",scv_mode="{scv_mode}"'
        self._lines: list[str] = []

    def add(self, name: str, value: float, **labels: object) -> None:
        own = "".join(f',{label}="{text}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{self._base}{own}}} {value}")

    def add_interval(self, name: str, values: Ratio, **labels: object) -> None:
        for ending, value in zip(("", "_low", "_high"), values, strict=True):
            self.add(name + ending, value, **labels)

    def page(self) -> str:
        return OTHERS + "\n".join([*self._lines, ""])


def modes_page(
    ratios: Mapping[str, Ratio] = {},
    groups: Mapping[str, int] = {},
    *,
    left_out: Mapping[str, int] = {},
    stopped: str | None = None,
    fallbacks: Mapping[str, int] = {},
    clock: str = "device",
    rank: int = 0,
    aa: Ratio | None = None,
) -> str:
    """A server in which off and stage are interleaved."""
    samples = Samples("interleave", "graph", rank)
    for size, number in {ALL: 0, **groups}.items():
        samples.add("nwor_live_groups_total", number, num_reqs=size)
    for size, ratio in ratios.items():
        samples.add_interval("nwor_live_ratio", ratio, num_reqs=size, clock=clock)
    if aa is not None:
        samples.add("nwor_live_aa_groups_total", 100, num_reqs=ALL)
        samples.add_interval("nwor_live_aa_ratio", aa, num_reqs=ALL, clock=clock)
    by_reason: dict[str, Mapping[str, int]] = {
        "nwor_live_groups_left_out_total": {"interrupted": 0, **left_out},
        "nwor_live_staging_stopped_total": {"ranks_differ": 0, **({stopped: 1} if stopped else {})},
        "nwor_fallback_count_total": {"kv_transfer": 0, **fallbacks},
    }
    for name, numbers in by_reason.items():
        for reason, number in numbers.items():
            samples.add(name, number, reason=reason)
    return samples.page()


def known(ratio: Ratio, **more: object) -> str:
    """400 groups of 5 to 8 requests, all with this ratio."""
    both = dict.fromkeys((ALL, "5-8"), 400)
    return modes_page(dict.fromkeys(both, ratio), both, **more)  # type: ignore[arg-type]


def drafts_page(
    classes: Mapping[str, Counts],
    *,
    groups: int = 400,
    half: float = 0.01,
    half_of_2: float | None = None,
    clock: str = "device",
    left_out: Mapping[str, int] = {},
) -> str:
    """A server in which 0 to 2 drafts are interleaved; `half` of each interval, as a fraction, and
    of those of k = 2 if they differ."""
    samples = Samples("off", "off")
    samples.add("nwor_drafts_info", 1, method="eagle3", model="some/head")
    for k, number in {0: 1000, 1: 3000, 2: 3100}.items():
        samples.add("nwor_drafts_windows_total", number, drafts=k)
    for why, number in {"interrupted": 0, **left_out}.items():
        samples.add("nwor_drafts_groups_left_out_total", number, reason=why)
    for size, counts in classes.items():
        for k, (time, tokens) in {0: (1.001, 0.0), **counts}.items():
            at: dict[str, object] = {"num_reqs": size, "drafts": k}
            most = 1 + (half if half_of_2 is None or k != 2 else half_of_2)
            samples.add("nwor_drafts_groups_total", groups, **at)
            ends = (time, time / most, time * most)
            samples.add_interval("nwor_drafts_time_ratio", ends, **at, clock=clock)
            if k:
                samples.add("nwor_drafts_spans_total", groups, **at)
                ends = (tokens, tokens / most, tokens * most)
                samples.add_interval("nwor_drafts_tokens", ends, **at)
    return samples.page()


DRAFTS = drafts_page(
    {"1": PAYS, "9-16": COSTS, ALL: PAYS}, left_out={"interrupted": 40, "drafts": 2}
)


class Server:
    """Answers each request with the next of its pages, the last one again and again."""

    def __init__(self, pages: tuple[str, ...], status: int) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                body = pages[min(len(outer.asked), len(pages)) - 1].encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@contextmanager
def serving(*pages: str, status: int = 200) -> Iterator[Server]:
    """A server that answers with these pages."""
    server = Server(pages, status)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
