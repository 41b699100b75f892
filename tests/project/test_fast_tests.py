"""`make test-fast` collects tests of every package, and loads nothing that takes seconds."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in (CHECKOUT / "nwor_bench").glob("*/__init__.py"))
COLLECT = """
import sys, pytest
code = pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]])
print("loaded:", *sorted({"vllm", "transformers"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.slow  # every test is collected
def test_test_fast_has_tests_of_every_package_and_imports_neither_vllm_nor_transformers() -> None:
    """Both take seconds in every process; a mark on the file, or an import in the test, avoids it.

    `python -X importtime` shows which module of a file that fails here imports them.
    """
    recipe = (CHECKOUT / "Makefile").read_text().partition("\ntest-fast:")[2]
    ignored, marks = re.findall(r'--ignore (\S+) .*?-m "(.*?)"', recipe, re.DOTALL)[0]
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, "--ignore", ignored, "-m", marks],
        cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *tests, loaded = [line for line in done.stdout.splitlines() if re.match("tests/|loaded:", line)]
    assert loaded == "loaded:"
    number = Counter(test.split("/")[1] for test in tests)
    assert [name for name in (*PACKAGES, "kernels", "project", "studies") if number[name] < 5] == []
