"""Patches: apply together or not at all, and leave no trace."""

import pytest
from refusals import refused

from nwor_bench.plugin.patching import Patch, PatchError, PatchSet


class Runner:
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


def test_what_is_patched_twice_or_by_somebody_else_is_left_as_it_is():
    runner = Runner()
    patch = Patch(runner, "method", wrapped)
    patch.apply()
    with refused("Runner.method", PatchError):
        patch.apply()
    assert runner.method() == ("wrapped", ("stock", 0))
    ours, theirs = runner.method, lambda: "theirs"
    runner.method = theirs
    with refused("Runner.method", PatchError):
        patch.undo()
    assert runner.method is theirs
    assert patch.applied
    runner.method = ours  # they undo theirs, then ours can go
    patch.undo()
    assert "method" not in vars(runner)


def test_a_set_checks_every_target_before_the_first_change():
    runner = Runner()
    patches = PatchSet([Patch(runner, "method", failing), Patch(runner, "missing", wrapped)])
    with refused("cannot attach to Runner.missing", PatchError):
        patches.apply()
    assert not patches.applied


def test_a_set_that_fails_half_way_undoes_what_it_did():
    runner = Runner()
    before = dict(vars(runner))
    culprit = Patch(Runner(), "method", failing)
    parts = [Patch(runner, "method", wrapped), Patch(runner, "hook", wrapped), culprit]
    with pytest.raises(RuntimeError, match="failed"):
        PatchSet(parts).apply()
    assert vars(runner) == before
    assert not any(part.applied for part in parts)


def test_a_set_undoes_all_that_it_can_before_it_complains():
    runner = Runner()
    patches = PatchSet(Patch(runner, name, wrapped) for name in ("method", "hook"))
    patches.apply()
    runner.hook = theirs = lambda: "theirs"
    with pytest.raises(PatchError, match=r"Runner\.hook"):
        patches.undo()
    assert runner.hook is theirs
    assert "method" not in vars(runner)
