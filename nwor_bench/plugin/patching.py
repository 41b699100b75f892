"""Reversible patches: a patch knows its target, refuses to half-apply, and undoes exactly."""

from collections.abc import Callable, Iterable
from typing import Any

from nwor_bench.errors import BenchError
from nwor_bench.instruments.versions import supported, vllm_version

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original callable and returns the one that replaces it."""


class PatchError(BenchError):
    """A patch's target is missing, already patched, or changed by other code."""


class Patch:
    """Replace one attribute of a class or an instance, and put it back.

    Args:
        target: the class or instance that owns the attribute.
        name: the attribute's name; it must exist and be callable.
    """

    def __init__(self, target: Any, name: str, wrapper: Wrapper):
        self._target = target
        self._name = name
        self._wrapper = wrapper
        self._replacement: Callable[..., Any] | None = None
        self._own_value: Any = None
        self._was_own = False

    @property
    def applied(self) -> bool:
        """True between apply() and undo()."""
        return self._replacement is not None

    def check(self) -> None:
        """Raise PatchError if the target cannot be patched; changes nothing."""
        if not callable(getattr(self._target, self._name, None)):
            raise PatchError.at(
                f"cannot attach to {self._describe()}",
                f"no such method in vLLM {vllm_version()}; nwor-bench was tried with {supported()}",
            )

    def apply(self) -> None:
        """Put the replacement in place; raises PatchError if applied twice or missing."""
        if self.applied:
            raise PatchError.at(self._describe(), "is already patched", joint=" ")
        self.check()
        self._was_own = self._name in vars(self._target)
        self._own_value = vars(self._target).get(self._name)
        replacement = self._wrapper(getattr(self._target, self._name))
        setattr(self._target, self._name, replacement)
        self._replacement = replacement

    def undo(self) -> None:
        """Restore what was there before; raises PatchError if other code replaced ours."""
        if not self.applied:
            return
        if vars(self._target).get(self._name) is not self._replacement:
            raise PatchError.at(self._describe(), "was patched again by other code", joint=" ")
        if self._was_own:
            setattr(self._target, self._name, self._own_value)
        else:
            delattr(self._target, self._name)
        self._replacement = self._own_value = None

    def _describe(self) -> str:
        owner = self._target if isinstance(self._target, type) else type(self._target)
        return f"{owner.__name__}.{self._name}"


def noting(target: Any, name: str, note: Callable[..., None]) -> Patch:
    """A patch that gives the arguments of each call to `note` first. Applied last, it stands in
    front of every other patch, so `note` sees what vLLM passed."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            note(*args, **named)
            return original(*args, **named)

        return noted

    return Patch(target, name, wrap)


class PatchSet:
    """Several patches that apply together or not at all."""

    def __init__(self, patches: Iterable[Patch]):
        self._patches = list(patches)
        self.applied = False
        """True when every patch is in place; asked for in every step."""

    def apply(self) -> None:
        """Check every target first, then apply all; on a failure undo what was applied."""
        for patch in self._patches:
            patch.check()
        done: list[Patch] = []
        try:
            for patch in self._patches:
                patch.apply()
                done.append(patch)
        except BaseException:
            for patch in reversed(done):
                patch.undo()
            raise
        self.applied = bool(self._patches)

    def undo(self) -> None:
        """Undo all, last applied first; then raise PatchError if some could not be undone."""
        problems = []
        self.applied = False
        for patch in reversed(self._patches):
            try:
                patch.undo()
            except PatchError as problem:
                problems.append(str(problem))
        if problems:
            raise PatchError("; ".join(problems))
