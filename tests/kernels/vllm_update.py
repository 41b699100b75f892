"""vLLM's update of its requests as a kernel of this process: interpreted, or compiled on a GPU."""

import importlib.util
import inspect
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import triton
from kernel_inputs import INTERPRETED

NAME = "_post_update_kernel"


DRAFTS = """\
    if draft_tokens_ptr is not None:
        for i in range(num_draft_tokens):
            token = tl.load(draft_tokens_ptr + tl.program_id(0) * num_draft_tokens + i)
            tl.store(draft_tokens_out_ptr + i, token)
"""
"""What vLLM 0.33's begins with."""


@cache
def stock_update(with_drafts: bool = False) -> Any:
    """vLLM's `_post_update_kernel`; without a GPU vLLM leaves it undecorated, so its text is read.

    Only that function: importing its module takes seconds. `with_drafts`: in vLLM 0.33's form,
    made of an older one's text.
    """
    site = importlib.util.find_spec("vllm")
    if site is None or not site.submodule_search_locations:
        pytest.skip("vLLM is not here")
    if not INTERPRETED and not with_drafts:
        from vllm.v1.worker.gpu import input_batch

        return getattr(input_batch, NAME)
    text = (Path(site.submodule_search_locations[0]) / "v1/worker/gpu/input_batch.py").read_text()
    start = text.index(f"def {NAME}(")
    body = inspect.getblock(text[start:].splitlines(keepends=True))
    if with_drafts and "draft_tokens_ptr" not in "".join(body):
        end = body.index("):\n")
        more = "    draft_tokens_ptr,\n    draft_tokens_out_ptr,\n    num_draft_tokens,\n"
        body[end : end + 1] = [more, body[end], DRAFTS]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stock_update.py"
        path.write_text("import triton.language as tl\n\n\n" + "".join(body))
        spec = importlib.util.spec_from_file_location("stock_update", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = triton.jit(getattr(module, NAME))
        _ = getattr(kernel, "rewriter", None)  # the interpreter reads the text when it first runs
        inspect.getsourcelines(kernel.fn)
        return kernel
