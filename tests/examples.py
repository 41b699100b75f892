"""How many examples a property gets that needs more or fewer than the others."""

from hypothesis import settings


def examples(number: int) -> settings:
    """`number` examples in `make test-all`; in shorter targets fewer, but at least 5."""
    share = settings().max_examples / settings.get_profile("test-all").max_examples
    return settings(max_examples=max(min(number, 5), round(number * share)))
