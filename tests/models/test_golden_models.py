"""`supports` and `plan` answer as the kept table says."""

import pytest
from golden_models import TABLE, kept, rows


@pytest.mark.slow  # two thousand answers
def test_every_answer_is_the_kept_one() -> None:
    wanted, found = kept(), list(rows())
    changed = sorted(set(found) - set(wanted))
    assert changed == [], f"decide, then write {TABLE.name} anew (golden_models.py)"
    assert len(found) == len(wanted)
