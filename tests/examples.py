"""How many examples a property gets that needs more or fewer than the others."""

from hypothesis import settings


def examples(number: int) -> settings:
    """`number` examples in `make test-all`; fewer in shorter targets, 5 where there are so many."""
    share = settings().max_examples / settings.get_profile("test-all").max_examples
    return settings(max_examples=max(min(number, 5), round(number * share)))
