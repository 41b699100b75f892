"""A stand-in for the package nvtx that keeps every range with what it lies in."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Recorded:
    """One range, with the ranges that were opened inside it."""

    name: str
    payload: int | None = None
    category: str | None = None
    inside: list["Recorded"] = field(default_factory=list)

    def all(self, name: str) -> list["Recorded"]:
        """Every range of this name in here, however deep, in order."""
        found = []
        for child in self.inside:
            found += [child] if child.name == name else []
            found += child.all(name)
        return found

    @property
    def names(self) -> list[str]:
        """The ranges directly inside."""
        return [child.name for child in self.inside]


class RecordingDomain:
    """What `nvtx.get_domain` returns while a tool listens."""

    def __init__(self) -> None:
        self.root = Recorded("everything")
        self.open = [self.root]

    def get_event_attributes(
        self, message: Any = None, color: Any = None, category: Any = None, payload: Any = None
    ) -> Recorded:
        assert type(payload) is int
        return Recorded(message, payload, category)

    def push_range(self, attributes: Recorded) -> None:
        self.open[-1].inside.append(attributes)
        self.open.append(attributes)

    def pop_range(self) -> None:
        self.open.pop()
        assert self.open, "more ranges were closed than opened"

    def take(self) -> Recorded:
        """Everything since the last call; all of it must be closed by now."""
        assert self.open == [self.root]
        root = self.root
        self.root = Recorded("everything")
        self.open = [self.root]
        return root


class NvtxModule(SimpleNamespace):
    """In place of `sys.modules["nvtx"]`; counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__(domains={})

    def get_domain(self, name: str) -> RecordingDomain:
        return self.domains.setdefault(name, RecordingDomain())


class NvtxThatMustNotBeCalled:
    """In place of `sys.modules["nvtx"]`: any use of it fails the test."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nvtx.{name} was asked for while ranges are off")
