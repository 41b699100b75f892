"""A run's CSV tables read back into records: a stored baseline keeps them without the raw records.

The inverse of `report.files.to_csv`: an empty field is None (or empty, for lists and mappings
that cannot be None), lists are joined by semicolons, mappings are JSON.
"""

import csv
import gzip
import json
import zlib
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from nwor_bench.errors import StoreError

Record = TypeVar("Record")


def read_table(path: Path, record_type: type[Record]) -> list[Record]:
    """The rows of a CSV table, plain or `.csv.gz`, as records of that type.

    Columns that the type does not have are left out, and fields without a column take their
    defaults. Raises StoreError, naming the row, if the file cannot be read or a value is wrong.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StoreError.at(path, f"cannot be read ({error})") from error
    hints = get_type_hints(record_type)
    adapter = TypeAdapter(record_type)
    records = []
    reader = csv.DictReader(StringIO(text, newline=""))
    for row in reader:
        try:
            # DictReader names surplus values None and gives None for missing ones.
            if None in row or None in row.values():
                raise ValueError("it has not as many values as there are columns")
            fields = {name: _value(hints[name], row[name]) for name in row if name in hints}
            records.append(adapter.validate_python(fields))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            field = f"{path}:{reader.line_num}: {place}"
            raise StoreError.at(field, first["msg"], first["input"]) from error
        except ValueError as error:
            raise StoreError.at(f"{path}:{reader.line_num}", str(error)) from error
    return records


def _value(hint: Any, text: str) -> Any:
    """A field's text, converted to the field's type by pydantic."""
    choices = get_args(hint)
    if NoneType in choices:
        if not text:
            return None
        hint = next(choice for choice in choices if choice is not NoneType)
    if get_origin(hint) is tuple:
        return tuple(text.split(";")) if text else ()
    if get_origin(hint) is dict:
        return json.loads(text) if text else {}
    return text
