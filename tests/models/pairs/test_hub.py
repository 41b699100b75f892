"""A hub model that cannot be had is refused at once, with one message."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter
from urllib.error import HTTPError

import huggingface_hub
import pytest
from huggingface_hub import constants
from refusals import refused

from nwor_bench.models.pairs import check_hub_models, local
from nwor_bench.models.pairs.local import check_hub_model, find_config
from nwor_bench.models.pairs.pair import ResolvedPair

ANSWERS = {
    "/org/there/resolve/main/config.json": (200, None),
    "/org/slow/resolve/main/config.json": (200, None),
    "/org/no-config/resolve/main/config.json": (404, "EntryNotFound"),
    "/org/gone/resolve/main/config.json": (404, "RepoNotFound"),
    "/org/gated/resolve/main/config.json": (403, "GatedRepo"),
    "/org/busy/resolve/main/config.json": (503, None),
}

CONTENT = b'{"model_type": "llama"}'

hub_may_answer = threading.Event()


class _Hub(BaseHTTPRequestHandler):
    asked: tuple[str, ...] = ()

    def do_HEAD(self) -> None:
        type(self).asked = (*self.asked, f"{self.command} {self.path}")
        code, word = ANSWERS.get(self.path, (404, "RepoNotFound"))
        if "/slow/" in self.path:
            hub_may_answer.wait()
        self.send_response(code)
        headers = {"X-Repo-Commit": "a" * 40, "ETag": '"1"', "Content-Length": len(CONTENT)}
        for name, value in headers.items() if code == 200 else ():
            self.send_header(name, str(value))
        if word is not None:
            self.send_header("X-Error-Code", word)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if ANSWERS.get(self.path, (404, None))[0] == 200:
            self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_Hub, "asked", ())
    hub_may_answer.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield _Hub
    hub_may_answer.set()
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


@pytest.mark.parametrize("name", ["org/there", "org/no-config"])
def test_what_the_hub_may_have_is_left_to_vllm_and_asked_once(
    own_hub: type[_Hub], name: str
) -> None:
    for _ in range(2):
        check_hub_model("--model", name)
    assert len(own_hub.asked) == 1


@pytest.mark.parametrize(
    ("name", "naming"),
    [("org/gone", "local folder"), ("org/gated", "(403)"), ("org/busy", "(503)")],
)
def test_what_the_hub_refuses_is_refused(own_hub: type[_Hub], name: str, naming: str) -> None:
    pair = ResolvedPair("x", "ngram", name, None, "auto")
    with refused("--model", value=name, cause=HTTPError, naming=naming):
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
    check_hub_model("--model", "org/there")
    assert constants.HF_HUB_OFFLINE
    cached(monkeypatch, None)
    with refused("--model", value="org/other", cause=None, naming="HF_HUB_OFFLINE"):
        check_hub_model("--model", "org/other")


def test_of_a_hub_model_only_config_json_is_fetched_and_kept(
    own_hub: type[_Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for slow, naming, limit in (("slow", "within 0.1 s", 0.1), ("no-config", "404", 30)):
        monkeypatch.setattr(local, "LIMIT_S", limit)
        with refused("--config", value=f"org/{slow}", cause=OSError, naming=naming):
            find_config("--config", f"org/{slow}")
    found = find_config("--config", "org/there")
    assert (found.name, found.config) == ("org/there", {"model_type": "llama"})
    files = {each.rpartition("/")[2] for each in own_hub.asked if "org/there" in each}
    assert files == {"config.json"}
    asked = own_hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_config("--config", "org/there") == found
    assert own_hub.asked == asked
    with refused("--config", value="org/other", cause=None, naming="HF_HUB_OFFLINE"):
        find_config("--config", "org/other")
