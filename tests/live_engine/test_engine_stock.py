"""Our CPU attention against the stock one, in two engines, each in a process of its own."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import prompts_of, smollm2_on_short, tiny_pair

from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]

ANSWER = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    job = json.load(open(sys.argv[1]))
    llm = LLM(**job["engine"])
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "attention": sorted({type(layer.impl).__name__ for layer in layers.values()}),
    }
    json.dump(answer, open(sys.argv[2], "w"))
"""


def answer(
    folder: Path, pair: ResolvedPair, prompts: list[list[int]], **variables: str
) -> dict[str, Any]:
    """Greedy tokens, attention classes and log of a plain vLLM process with these variables."""
    folder.mkdir(parents=True)
    engine = {
        "model": pair.target,
        "dtype": pair.dtype,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "speculative_config": pair.speculative_config(4),
    }
    (folder / "job.json").write_text(json.dumps({"engine": engine, "prompts": prompts}))
    (folder / "answer.py").write_text(ANSWER)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}
    script = [sys.executable, "answer.py", "job.json", "out.json"]
    done = subprocess.run(script, cwd=folder, env=environ, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return {**json.loads((folder / "out.json").read_text()), "log": log}


def answers(
    folder: Path, pair: ResolvedPair, prompts: list[list[int]], **runs: dict[str, str]
) -> list[dict[str, Any]]:
    """`answer` for each set of variables, two processes at a time."""
    with ThreadPoolExecutor(2) as side_by_side:
        jobs = [
            side_by_side.submit(answer, folder / name, pair, prompts, **variables)
            for name, variables in runs.items()
        ]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_same_tokens_as_stock_in_float32(tmp_path: Path, method: str) -> None:
    pair = tiny_pair(tmp_path / "pair", method)
    prompts = prompts_of([24, 31, 18, 40, 150, 22, 35, 29])
    modes = {mode: {"VLLM_NWOR_MODE": mode} for mode in ("off", "stage")}
    stock, ours, staged = answers(tmp_path, pair, prompts, stock={}, **modes)
    assert stock["attention"] == ["CPUAttentionBackendImpl"]
    assert ours["attention"] == staged["attention"] == ["ReferenceCPUAttentionImpl"]
    assert ours["tokens"] == stock["tokens"]
    assert staged["tokens"] == stock["tokens"]


def test_smollm2_in_bf16_differs_from_stock_only_if_logits_are_close(tmp_path: Path) -> None:
    """Each first difference is between two tokens whose float32 logits bf16 cannot tell apart."""
    from transformers import AutoModelForCausalLM

    pair, prompts = smollm2_on_short("smollm2-ngram", 8)
    stock, ours = answers(tmp_path, pair, prompts, stock={}, ours={"VLLM_NWOR_MODE": "off"})
    exact = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    rough = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.bfloat16)
    differing = 0
    for prompt, a, b in zip(prompts, stock["tokens"], ours["tokens"], strict=True):
        if a == b:
            continue
        differing += 1
        at = next(i for i in range(32) if a[i] != b[i])
        ids = torch.tensor([prompt + a[:at]])
        with torch.no_grad():
            logits = exact(ids).logits[0, -1]
            error = (rough(ids).logits[0, -1].float() - logits).abs().max()
        gap = (logits[a[at]] - logits[b[at]]).abs()
        assert gap <= 2 * error, f"request differs at token {at}: gap {gap}, bf16 error {error}"
    print(f"smollm2 bf16, ours against stock: {differing} of {len(prompts)} requests differ")
