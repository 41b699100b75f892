"""The run folder: what goes in comes back, whatever a crash cuts off."""

import gzip
import json
import math
import os
import resource
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from synthetic_run import make_run, save_run

from nwor_bench.errors import ExitCode, StoreError
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.files import KEPT_RECORDS_FILE, RECORDS_FILE, RUN_FILE, default_folder
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key, parse_records, record_line
from nwor_bench.records.store import RunStore, read_run
from nwor_bench.records.types import BatchRecord, RunStatus, WindowRecord, columns
from nwor_bench.records.window import table_of, windows_of

HEADER = RunHeader(scenario={"name": "short"})
ON_CPU = EngineStatus(device="cpu")
RUN = make_run(blocks=1, windows=2)
BATCH = RUN.batches[0]
WINDOWS = [window for window in RUN.windows if batch_key(window) == batch_key(BATCH)]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path / "deep" / "run", HEADER)


def test_a_run_comes_back_as_it_was_written_and_kept_records_too(tmp_path):
    save_run(RUN, tmp_path)
    found = read_run(tmp_path)
    assert (found.batches, found.windows, found.warnings) == (RUN.batches, RUN.windows, ())
    assert (found.header.status, found.header.engine) == ("complete", RUN.header.engine)
    plain, kept = tmp_path / RECORDS_FILE, tmp_path / KEPT_RECORDS_FILE
    whole = gzip.compress(plain.read_bytes())
    plain.unlink()
    kept.write_bytes(whole)
    assert read_run(tmp_path) == found
    for cut in (0, 5, 40, -1):
        kept.write_bytes(whole[:cut] or b"no gzip")
        with refused(kept, StoreError):
            read_run(tmp_path)


def test_what_a_run_is_told_on_its_way_comes_back(store):
    events = ({"event": "start", "seconds": 1.5}, {"event": "interrupted"})
    store.append_event(events[0])
    store.append_batch(BATCH, WINDOWS)
    store.append_event(events[1])
    found = read_run(store.folder)
    assert (found.events, found.batches) == (events, (BATCH,))
    assert found.header.status == RunStatus.PARTIAL
    store.update(engine=ON_CPU)
    store.finish(RunStatus.COMPLETE, finished_at="later")
    header = read_run(store.folder).header
    assert (header.scenario, header.engine) == (HEADER.scenario, ON_CPU)
    assert (header.finished_at, header.status) == ("later", "complete")
    assert sorted(path.name for path in store.folder.iterdir()) == [RECORDS_FILE, RUN_FILE]


@pytest.mark.parametrize("left", [RUN_FILE, RECORDS_FILE])
def test_a_folder_that_holds_a_run_is_refused(store, left):
    (store.folder / ({RUN_FILE, RECORDS_FILE} - {left}).pop()).unlink()
    before = (store.folder / left).read_bytes()
    with refused(
        "--output", value=str(store.folder), cause=None, naming="already holds a run"
    ) as caught:
        RunStore.create(store.folder, HEADER)
    assert caught.value.exit_code == ExitCode.BAD_USAGE
    assert (store.folder / left).read_bytes() == before


def test_an_output_that_is_no_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    RunStore.create(tmp_path / "empty", HEADER)
    with refused("--output", value=str(tmp_path), naming="files (empty)"):
        RunStore.create(tmp_path, HEADER)
    (tmp_path / "file").write_text("not a folder")
    for where in ("file", "file/below"):
        with refused("--output", value=str(tmp_path / where), cause=NotADirectoryError) as caught:
            RunStore.create(tmp_path / where, HEADER)
        assert caught.value.exit_code == ExitCode.BAD_USAGE
    with refused("run folder", value=str(tmp_path)):
        read_run(tmp_path)


def test_a_run_without_its_records_says_what_it_is_good_for(store):
    (store.folder / RECORDS_FILE).unlink()
    for read in (read_run, RunStore.open):
        with refused(store.folder / RECORDS_FILE, StoreError, cause=FileNotFoundError):
            read(store.folder)


@pytest.mark.parametrize("version", [1, 3, "2", None, True])
def test_other_versions_are_refused_and_the_known_ones_named(store, version):
    path = store.folder / RUN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    with refused(
        "run.json: format_version", StoreError, value=version, naming="reads 2: run the sweep again"
    ):
        read_run(store.folder)
    with pytest.raises(StoreError):
        RunStore.open(store.folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "\x00"])
def test_a_header_that_is_no_json_is_refused(store, text):
    (store.folder / RUN_FILE).write_text(text)
    with refused(store.folder / RUN_FILE, StoreError, cause=ValueError):
        read_run(store.folder)


def test_a_batch_is_stored_once(store):
    store.append_batch(BATCH, WINDOWS)
    with refused(f"batch {batch_key(BATCH)}", StoreError, value=None):
        RunStore.open(store.folder).append_batch(BATCH, WINDOWS)
    assert read_run(store.folder).batches == (BATCH,)


NO_JSON = {"cause": ValueError}


@pytest.mark.parametrize(
    ("batch", "windows", "field", "shown"),
    [
        (BATCH, [*WINDOWS, replace(WINDOWS[0], batch=99)],
         f"a window of {BATCH.cell.label}, batch 99", {}),
        (BATCH, WINDOWS[1:], f"batch {batch_key(BATCH)}", {"value": 1}),
        (replace(BATCH, latency_ms=math.nan), WINDOWS, "a batch record cannot be stored", NO_JSON),
        (replace(BATCH, latency_ms=math.inf), WINDOWS, "a batch record cannot be stored", NO_JSON),
    ],
)  # fmt: skip
def test_what_is_no_whole_batch_is_refused_and_nothing_written(store, batch, windows, field, shown):
    with refused(field, StoreError, **shown):
        store.append_batch(batch, windows)
    with refused('an event may not have a field "kind"', StoreError, value="batch"):
        store.append_event({"kind": "batch"})
    assert (store.folder / RECORDS_FILE).read_bytes() == b""


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_append_leaves_no_half_line(store, monkeypatch, failure):
    store.append_batch(BATCH, WINDOWS)
    whole = (store.folder / RECORDS_FILE).read_bytes()

    def fail(_):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    expected = StoreError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        store.append_event({"event": "lost"})
    assert (store.folder / RECORDS_FILE).read_bytes() == whole


def test_a_line_that_a_full_disk_cuts_leaves_no_half_line(store):
    path = store.folder / RECORDS_FILE
    store.append_batch(BATCH, WINDOWS)
    whole = path.read_bytes()
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, kept[1]))
    try:
        with refused(path, StoreError):
            store.append_event({"event": "cut in its middle"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert path.read_bytes() == whole
    store.append_event({"event": "next"})
    assert read_run(store.folder).events == ({"event": "next"},)


def test_what_was_appended_is_on_the_disk_before_the_next_batch(store, monkeypatch):
    path = store.folder / RECORDS_FILE
    synchronised: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synchronised.append(path.read_bytes()))
    store.append_batch(BATCH, WINDOWS)
    assert synchronised == [LINES]
    store.append_event({"event": "kept"})
    assert synchronised[1:] == [path.read_bytes()]


@pytest.fixture
def synced_folders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, set[str]]]:
    """Every folder that was synchronised, with the names that it had then."""
    found: list[tuple[Path, set[str]]] = []

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            found.append((path, {entry.name for entry in path.iterdir()}))

    monkeypatch.setattr(os, "fsync", sync)
    return found


def test_a_new_runs_files_and_folders_have_their_names_on_the_disk(tmp_path, synced_folders):
    run = tmp_path / "deep" / "run"
    store = RunStore.create(run, HEADER)
    both = (run, {RECORDS_FILE, RUN_FILE})
    assert (tmp_path / "deep", {"run"}) in synced_folders
    assert (tmp_path, {"deep"}) in synced_folders
    # The records have their name before run.json says that there is a run.
    assert synced_folders.index((run, {RECORDS_FILE})) < synced_folders.index(both)
    synced_folders.clear()
    store.update(engine=ON_CPU)
    assert synced_folders == [both]
    synced_folders.clear()
    (tmp_path / "there").mkdir()
    RunStore.create(tmp_path / "there", HEADER)  # its parents have its name already
    assert {folder for folder, _ in synced_folders} == {tmp_path / "there"}


def test_a_file_system_that_synchronises_no_folders_is_written_all_the_same(store, monkeypatch):
    """EINVAL says that there is no such operation; any other error is one."""
    error = 22

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", refuse)
    store.update(engine=ON_CPU)
    assert read_run(store.folder).header.engine == ON_CPU
    error = 5
    with refused(store.folder / RUN_FILE, StoreError, cause=OSError, naming=os.strerror(error)):
        store.update(engine=EngineStatus(device="cuda"))


LINES = b"".join(map(record_line, [*WINDOWS, BATCH]))
SECOND = replace(BATCH, batch=77)
SECOND_WINDOWS = [replace(window, batch=77) for window in WINDOWS]
SECOND_LINES = b"".join(map(record_line, [*SECOND_WINDOWS, SECOND]))


@given(kept=st.integers(0, len(SECOND_LINES)))
def test_a_run_torn_at_any_byte_keeps_every_whole_batch(kept):
    found = parse_records(Path("r.jsonl"), LINES + SECOND_LINES[:kept])
    whole = kept == len(SECOND_LINES)
    assert found.batches == ([BATCH, SECOND] if whole else [BATCH])
    assert found.windows == (WINDOWS + SECOND_WINDOWS if whole else WINDOWS)
    assert found.whole_bytes == len(LINES) + (kept if whole else 0)
    assert bool(found.warnings) == (0 < kept < len(SECOND_LINES))


@pytest.mark.parametrize("cut", [1, 40, len(record_line(SECOND)), len(record_line(SECOND)) + 1])
def test_a_torn_run_can_be_continued(store, cut):
    store.append_batch(BATCH, WINDOWS)
    with (store.folder / RECORDS_FILE).open("ab") as file:
        file.write(SECOND_LINES[:-cut])
    assert read_run(store.folder).warnings
    RunStore.open(store.folder).append_batch(SECOND, SECOND_WINDOWS)
    found = read_run(store.folder)
    assert found.batches == (BATCH, SECOND)
    assert found.windows == (*WINDOWS, *SECOND_WINDOWS)
    assert found.warnings == ()


NO_COUNT = record_line(WINDOWS[0]).replace(b'"num_reqs":2', b'"num_reqs":"two"')


def odd_batch(**fields: str) -> bytes:
    return record_line(replace(BATCH, windows=0, **fields))


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        *((LINES + line + b"\n" + SECOND_LINES, "r.jsonl:4", ...)
          for line in (b"{}", b"[]", b"7", b"not json", b"", b"\xff", b"[" * 10**5,
                       b'{"kind":"other"}')),
        (LINES + b'{"kind":"batch"}\n' + SECOND_LINES, "r.jsonl:4: batch record, pair", ...),
        (NO_COUNT, "r.jsonl:1: window record, num_reqs", "two"),
        # A mode or phase that this version does not know.
        (odd_batch(nwor_mode="held"), "r.jsonl:1: batch record, nwor_mode", "held"),
        (odd_batch(scv_mode="host"), "r.jsonl:1: batch record, scv_mode", "host"),
        (odd_batch(phase="rest"), "r.jsonl:1: batch record, phase", "rest"),
        # Windows before another batch; a line that is gone, or there twice.
        (record_line(WINDOWS[0]) + record_line(SECOND), "r.jsonl:2", None),
        (LINES.partition(b"\n")[2], "r.jsonl:2", 1),
        (record_line(WINDOWS[0]) + LINES, "r.jsonl:4", 3),
        (LINES + SECOND_LINES + LINES, "r.jsonl:9: batch 500", None),
    ],
)  # fmt: skip
def test_damage_before_the_end_is_named_by_its_line(lines, field, value):
    with refused(field, StoreError, **({} if value is ... else {"value": value})):
        parse_records(Path("r.jsonl"), lines)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
TIMES = ("wall_ms", "forward_ms", "sample_ms", "mask_ms", "commit_ms")
ANY_WINDOW = st.builds(
    WindowRecord,
    **{name: st.none() | FINITE for name in TIMES},
    fallback_reason=st.none() | st.just("stage:layer"),
)
ANY_BATCH = st.builds(BatchRecord, latency_ms=FINITE, tokens_per_s=FINITE, temperature=FINITE)


@given(batch=ANY_BATCH, windows=st.lists(ANY_WINDOW, max_size=3))
def test_any_record_survives_its_line(batch, windows):
    batch = replace(batch, windows=len(windows))
    pair, block, number = batch_key(batch)
    nwor_mode, scv_mode = batch.nwor_mode, batch.scv_mode
    own = [
        replace(w, pair=pair, nwor_mode=nwor_mode, scv_mode=scv_mode, block=block, batch=number)
        for w in windows
    ]
    found = parse_records(Path("r.jsonl"), b"".join(map(record_line, [*own, batch])))
    assert found.batches == [batch]
    assert found.windows == own
    assert found.warnings == []


@given(st.lists(ANY_WINDOW, max_size=4), st.none() | st.integers(0, 3))
def test_a_table_is_the_windows_on_either_side_of_a_process_border(windows, number):
    """JSON stands for the border: it leaves no type, and makes tuples lists."""
    windows = [replace(window, cell_number=number) for window in windows]
    table = table_of(windows)
    assert windows_of(table) == windows_of(json.loads(json.dumps(table))) == windows
    assert "cell_number" not in columns(WindowRecord)  # it is never stored


def test_default_folder_is_utc_and_safe():
    now = datetime(2031, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    folder = default_folder(Path("runs"), "short", "org/model: 1", now)
    assert folder == Path("runs/20310102T010405Z-short-org-model-1")
