"""The form in which windows leave a worker: columns of plain values, and nothing is lost."""

import json

from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.records.types import columns
from nwor_bench.records.window import WindowRecord, table_of, windows_of

windows = st.lists(
    st.builds(
        WindowRecord,
        fallback_reason=st.none() | st.just("stage:layer"),
        cell_number=st.none() | st.integers(0, 3),
        wall_ms=st.none() | st.floats(0, 9),
    ),
    max_size=4,
)


@given(windows)
def test_a_table_is_the_windows_on_either_side_of_a_process_border(records):
    """JSON stands for the border: it leaves no type, and makes tuples lists."""
    table = table_of(records)
    assert windows_of(table) == windows_of(json.loads(json.dumps(table))) == records


def test_a_cells_number_is_never_stored():
    assert "cell_number" not in columns(WindowRecord)
