"""A hub model that cannot be had is refused at once, with one message."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import perf_counter
from urllib.error import HTTPError

import huggingface_hub
import pytest
from huggingface_hub import constants
from refusals import refused

from nwor_bench.models.pairs import check_hub_models, local
from nwor_bench.models.pairs.local import check_hub_model
from nwor_bench.models.pairs.pair import ResolvedPair

ANSWERS = {
    "/org/there/resolve/main/config.json": (200, None),
    "/org/no-config/resolve/main/config.json": (404, "EntryNotFound"),
    "/org/gone/resolve/main/config.json": (404, "RepoNotFound"),
    "/org/gated/resolve/main/config.json": (403, "GatedRepo"),
    "/org/busy/resolve/main/config.json": (503, None),
}


class _Hub(BaseHTTPRequestHandler):
    asked: tuple[str, ...] = ()

    def do_HEAD(self) -> None:
        type(self).asked = (*self.asked, self.path)
        code, word = ANSWERS[self.path]
        self.send_response(code)
        if word is not None:
            self.send_header("X-Error-Code", word)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_Hub, "asked", ())
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield _Hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens


def cached(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: path)


@pytest.mark.parametrize("name", ["org/there", "org/no-config", "org/busy"])
def test_what_the_hub_may_have_is_left_to_vllm(own_hub: type[_Hub], name: str) -> None:
    check_hub_model("--target-model", name)
    assert len(own_hub.asked) == 1


@pytest.mark.parametrize(("name", "naming"), [("org/gone", "local folder"), ("org/gated", "(403)")])
def test_what_the_hub_refuses_is_refused(own_hub: type[_Hub], name: str, naming: str) -> None:
    pair = ResolvedPair("x", "ngram", name, None, "auto")
    with refused("--target-model", value=name, cause=HTTPError, naming=naming):
        check_hub_models(pair)


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cached(monkeypatch, None)
    began = perf_counter()
    with refused("--draft-model", value="org/there", cause=OSError, naming="127.0.0.1:9"):
        check_hub_model("--draft-model", "org/there")
    assert perf_counter() - began < local.LIMIT_S


@pytest.mark.usefixtures("no_hub")
def test_a_cached_model_is_used_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached(monkeypatch, str(tmp_path))
    check_hub_model("--target-model", "org/there")
    assert constants.HF_HUB_OFFLINE
    cached(monkeypatch, None)
    with refused("--target-model", value="org/other", cause=None, naming="HF_HUB_OFFLINE"):
        check_hub_model("--target-model", "org/other")
