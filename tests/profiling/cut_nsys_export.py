"""Cut an export of Nsight Systems down to what its reader looks at, for tests/data.

    python tests/profiling/cut_nsys_export.py EXPORT.sqlite [SMALL.sqlite]

Kept as they are: the tables' own statements, all NVTX events, the texts that they name, and which
version wrote the export. Everything else goes, what names the machine and its folders first.
"""

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "data" / "nsys_cpu.sqlite"

KEPT = ("StringIds", "NVTX_EVENTS", "META_DATA_EXPORT", "ENUM_NSYS_EVENT_TYPE")


def cut(source: Path, target: Path) -> None:
    """Write the small export anew."""
    shutil.copy(source, target)
    with closing(sqlite3.connect(target)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            if name not in KEPT:
                db.execute(f'DROP TABLE "{name}"')
        db.execute(
            "DELETE FROM StringIds WHERE id NOT IN "
            "(SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL)"
        )
        db.execute(
            "DELETE FROM META_DATA_EXPORT WHERE name NOT LIKE 'EXPORT_PRODUCT%' "
            "AND name NOT LIKE 'EXPORT_SCHEMA%'"
        )
        db.commit()
        db.execute("VACUUM")


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else PATH)
