"""When the command line starts itself again, and that it does so once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.engine import preload
from nwor_bench.engine.preload import LIBRARY, PRELOADED, openmp_library, preload_environment

HERE = Path("/venv/lib") / LIBRARY


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "openmp_library", lambda: HERE)


def test_the_library_is_preloaded_and_the_rest_kept(cpu_build: None) -> None:
    environ = preload_environment({"HOME": "/root", "LD_PRELOAD": "/usr/lib/libtcmalloc.so"})
    assert environ is not None
    assert environ["LD_PRELOAD"] == f"{HERE}:/usr/lib/libtcmalloc.so"
    assert environ["HOME"] == "/root"


def test_nothing_is_preloaded_beside_it_when_nothing_was(cpu_build: None) -> None:
    for before in ({}, {"LD_PRELOAD": ""}):
        environ = preload_environment(before)
        assert environ is not None
        assert environ["LD_PRELOAD"] == str(HERE)


@pytest.mark.parametrize("environ", [{PRELOADED: "1"}, {"LD_PRELOAD": f"/other/{LIBRARY}"}])
def test_who_has_it_goes_on(cpu_build: None, environ: dict[str, str]) -> None:
    assert preload_environment(environ) is None


def test_without_the_library_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "openmp_library", lambda: None)
    assert preload_environment({}) is None


@given(st.dictionaries(st.sampled_from(["LD_PRELOAD", "A", "KMP_WARNINGS"]), st.text("ab:/")))
def test_starting_again_happens_at_most_once(environ: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preload, "openmp_library", lambda: HERE)
        again = preload_environment(environ)
        assert again is not None
        assert preload_environment(again) is None
        # Even where the loader drops LD_PRELOAD.
        assert preload_environment({**again, "LD_PRELOAD": ""}) is None
    assert all(again[name] == value for name, value in environ.items() if name != "LD_PRELOAD")


def test_the_library_is_that_of_the_cpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(preload, "is_cpu_build", lambda: True)
    assert openmp_library() is None  # installed, but the file is not there
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / LIBRARY).touch()
    assert openmp_library() == tmp_path / "lib" / LIBRARY
    monkeypatch.setattr(preload, "is_cpu_build", lambda: False)
    assert openmp_library() is None


def test_the_process_is_replaced_with_its_own_arguments(
    cpu_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execve", lambda *args: calls.append(args))
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "nwor_bench", "sweep", "--seed", "3"])
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv(PRELOADED, "1")
    preload.run_under_one_openmp()
    assert calls == []
    monkeypatch.delenv(PRELOADED)
    preload.run_under_one_openmp()
    ((program, argv, environ),) = calls
    assert program == "/venv/bin/python"
    assert argv == ["/venv/bin/python", "-m", "nwor_bench", "sweep", "--seed", "3"]
    assert environ[PRELOADED] == "1"
