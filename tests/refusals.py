"""What a test asks of a refusal: its type, field and value, so that a sentence may be reworded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nwor_bench.errors import BenchError, ConfigError


@contextmanager
def refused(
    field: object, kind: type[BenchError] = ConfigError, *, naming: str = "", **wanted: Any
) -> Iterator[pytest.ExceptionInfo[BenchError]]:
    """Expect exactly this type of error at this field.

    Args:
        field: all of the error's field, or its last parts: "axes.requests" and
            "s.toml:3: axes.requests" are both found in "/tmp/s.toml:3: axes.requests".
        naming: what the message must show besides, a datum and no wording: a device, another flag.
        wanted: `value` and `near` of the error; `cause`: the type of what it was raised from, None
            for an error raised from nothing.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}, not {kind.__name__}: {error}"
    whole, asked = error.field, str(field)
    assert whole == asked or (asked and whole.endswith((f": {asked}", f"/{asked}"))), (
        f"{whole!r} is refused, not {asked!r}: {error}"
    )
    assert naming in str(error), f"{naming!r} is not in: {error}"
    if (cause := wanted.pop("cause", ...)) is not ...:
        found = error.__cause__
        assert found is None if cause is None else isinstance(found, cause), repr(found)
    for name, value in wanted.items():
        assert getattr(error, name) == value, f"{name} is {getattr(error, name)!r}: {error}"
