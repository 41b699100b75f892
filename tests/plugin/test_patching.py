"""Patches: apply together or not at all, and leave no trace."""

import pytest
from refusals import refused

from nwor_bench.plugin.patching import Patch, PatchError, PatchSet


class Base:
    def inherited(self):
        return "inherited"


class Runner(Base):
    def __init__(self):
        self.hook = lambda: "own"
        self.number = 3

    def method(self, x=0):
        return ("stock", x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)


class Refusing:
    """Nothing can be set on it."""

    def method(self):
        return "stock"

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is read-only")


def wrapped(original):
    def replacement(*args, **kwargs):
        return ("wrapped", original(*args, **kwargs))

    return replacement


def failing(original):
    raise RuntimeError("the wrapper failed")


@pytest.fixture(autouse=True)
def stock_classes():
    before = dict(vars(Runner))
    yield
    assert dict(vars(Runner)) == before


def test_an_instances_inherited_method_is_wrapped_only_on_that_instance():
    runner, other = Runner(), Runner()
    before = dict(vars(runner))
    patch = Patch(runner, "method", wrapped)
    for _ in range(2):
        assert not patch.applied
        patch.apply()
        assert patch.applied
        assert runner.method(7) == ("wrapped", ("stock", 7))
        assert other.method(7) == ("stock", 7)
        patch.undo()
        assert not patch.applied
        assert vars(runner) == before
        assert runner.method(7) == ("stock", 7)
    patch.undo()  # nothing to undo


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_a_class_gets_back_the_very_object_that_it_had(name):
    own = vars(Runner)[name]
    patch = Patch(Runner, name, wrapped)
    patch.apply()
    assert vars(Runner)[name] is not own
    patch.undo()
    assert vars(Runner)[name] is own


@pytest.mark.parametrize(
    ("runner", "name"), [(Runner(), "missing"), (Runner(), "number"), (Runner, "missing")]
)
def test_a_target_that_is_no_method_is_refused_and_nothing_changes(runner, name):
    before = dict(vars(runner))
    patch = Patch(runner, name, wrapped)
    for act in (patch.check, patch.apply):
        with refused(f"cannot attach to Runner.{name}", PatchError):
            act()
    assert not patch.applied
    assert vars(runner) == before


def test_applying_twice_is_refused_and_the_first_stays():
    runner = Runner()
    patch = Patch(runner, "method", wrapped)
    patch.apply()
    with refused("Runner.method", PatchError):
        patch.apply()
    assert runner.method() == ("wrapped", ("stock", 0))
    patch.undo()
    assert runner.method() == ("stock", 0)


def test_what_somebody_else_patched_since_is_left_to_them():
    runner = Runner()
    patch = Patch(runner, "method", wrapped)
    patch.apply()
    ours = runner.method

    def theirs():
        return "theirs"

    runner.method = theirs
    with refused("Runner.method", PatchError):
        patch.undo()
    assert runner.method is theirs
    assert patch.applied
    runner.method = ours  # they undo theirs, then ours can go
    patch.undo()
    assert "method" not in vars(runner)


def test_a_set_checks_every_target_before_the_first_change():
    runner, built = Runner(), []

    def recording(original):
        built.append(original)
        return wrapped(original)

    patches = PatchSet([Patch(runner, "method", recording), Patch(runner, "missing", wrapped)])
    with refused("cannot attach to Runner.missing", PatchError):
        patches.apply()
    assert built == []
    assert not patches.applied


@pytest.mark.parametrize(
    "culprit", [Patch(Runner(), "method", failing), Patch(Refusing(), "method", wrapped)]
)
def test_a_set_that_fails_half_way_undoes_what_it_did(culprit):
    runner = Runner()
    before = dict(vars(runner))
    parts = [Patch(runner, "method", wrapped), Patch(runner, "hook", wrapped), culprit]
    with pytest.raises((RuntimeError, AttributeError)):
        PatchSet(parts).apply()
    assert vars(runner) == before
    assert not any(part.applied for part in parts)


def test_a_set_undoes_all_that_it_can_before_it_complains() -> None:
    class Target:
        def first(self) -> str:
            return "stock"

        def second(self) -> str:
            return "stock"

    patches = PatchSet(
        [Patch(Target, name, lambda _: lambda self: "ours") for name in ("first", "second")]
    )
    patches.apply()
    Target.second = lambda self: "somebody else's"  # type: ignore[method-assign]
    with pytest.raises(PatchError, match=r"Target\.second"):
        patches.undo()
    assert Target().first() == "stock"
    assert Target().second() == "somebody else's"
