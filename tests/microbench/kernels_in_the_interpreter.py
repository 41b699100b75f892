"""Run by test_microbench_interpreter.py with TRITON_INTERPRET=1: our kernels on tiny windows.

Prints a JSON object: what is wrong with each kernel's result, as it is and with its call left out.
bf16 products and rounding to fp8 are not what the interpreter can do, so attention and fp8 caches
wait for a GPU.
"""

import json

import torch

from nwor_bench.microbench import inputs
from nwor_bench.microbench.cases import OURS, Group, Shape, Window
from nwor_bench.microbench.commit import commit_implementations

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64)


def main() -> None:
    inputs.COLD_BYTES = 1
    found = {}
    group = Group("commit", "bf16", Window(2, 3), 0.5)
    built = commit_implementations(group, SHAPE, torch.device("cpu"), 1)
    for each in built.runnable:
        if each.name in (OURS, "copy"):
            right = each.check()
            each.calls[0] = lambda: None
            found[each.name] = [right, each.check()]
    found["refused"] = list(built.refused)
    print(json.dumps(found))


main()
