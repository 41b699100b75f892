"""partials.csv and partials.md: what each way to treat partial results takes, and writes to DRAM.

    python tests/benchmarks/partial_table.py DIR --dram LOG --output sweeps/results/h200

DIR holds `kernels.csv` and `kernels.json` of a run of `partial_results.py`, LOG what it printed;
that script calls this one itself at its end.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

BACKGROUND = "reads alone"
"""Two reads where every other line has a launch and one read."""

LINE = re.compile(
    r"verify_attention (?P<requests>\d+)x(?P<drafts>\d+) \S+, context (?P<context>\d+): "
    r"(?P<way>[\w ]+): (?P<written>[\d.]+) MB written to DRAM in a window"
)
CASE = ["requests", "drafts", "context"]

TEXT = """# What becomes of the verification kernel's partial results

    {command}

{gpu}. 3B shape: 28 layers, 24 query and 8 K/V heads of 128, bf16.

{table}

- `time/as it was`: of one launch, L2 cold, in CUDA graphs, over the kernel that keeps and writes
  all partial results (`nwor`), with its 95 % interval.
- `left MB`: what the 28 launches of a window leave in DRAM, the output included. Each launch is
  followed by a read of 128 MiB, as a layer is by its weights, and what such reads write by
  themselves is taken off: half of `reads alone`, which has two of them. Printed to 0.1 MB.
- `above output MB`: the same without the bf16 output, which every attention writes.
- `discarded`: merged partial results are dropped from L2 before they are written to DRAM
  (`discard.L2`). `unpadded`: padding rows of a tile are not left. `whole_pairs`: a request's K/V
  head goes to one program wherever that costs no program more than 5 % more steps, so that there
  is nothing to merge. `all`: the three together, which is the default since this measurement
  (`nwor_kernels/verify_attention/tuning.py`).

What `all` still leaves above its output at 64x8 are no partial results (its pairs are whole there)
but spilled registers: see [dram.md](dram.md).
"""


def dram_rows(lines: Iterable[str]) -> pd.DataFrame:
    """The counters' lines as rows: requests, drafts, context, way, written_mb.

    Raises:
        ValueError: no line is one of the counters'.
    """
    found = [match.groupdict() for line in lines if (match := LINE.search(line))]
    if not found:
        raise ValueError("no line tells what was written to DRAM")
    frame = pd.DataFrame(found).rename(columns={"written": "written_mb"})
    return frame.astype({**dict.fromkeys(CASE, int), "written_mb": float})


def joined(times: pd.DataFrame, dram: pd.DataFrame, bytes_of_output: int) -> pd.DataFrame:
    """Times and bytes of each way; `bytes_of_output` are those of one query token's outputs."""
    written = dram.set_index([*CASE, "way"])["written_mb"]
    rows = []
    for row in times.to_dict("records"):
        case = tuple(row[name] for name in CASE)
        left = written[(*case, row["implementation"])] - written[(*case, BACKGROUND)] / 2
        output = row["requests"] * (row["drafts"] + 1) * bytes_of_output / 1e6
        kept = ("time_us", "time_over_nwor", "time_over_nwor_low", "time_over_nwor_high")
        rows.append(
            dict(zip(CASE, case, strict=True))
            | {"way": row["implementation"]}
            | {name: row[name] for name in kept}
            | {
                "written_mb": written[(*case, row["implementation"])],
                "left_mb": round(left, 2),
                "output_mb": round(output, 2),
                "above_output_mb": round(left - output, 2),
            }
        )
    return pd.DataFrame(rows)


def write_table(folder: Path, lines: Iterable[str], output: Path) -> None:
    """partials.csv and partials.md in `output`, from a run's folder and what it printed."""
    result = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    shape = result["spec"]["shape"]
    of_token = shape["heads"] * shape["head_dim"] * 2 * shape["layers"]
    rows = joined(pd.read_csv(folder / "kernels.csv"), dram_rows(lines), of_token)
    output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(output / "partials.csv", index=False)
    text = TEXT.format(command=_command(result), gpu=_gpu(result), table=_markdown(rows))
    (output / "partials.md").write_text(text, encoding="utf-8")


def _command(result: dict[str, object]) -> str:
    return str(result["command"]).replace(
        "nwor-bench", "python tests/benchmarks/partial_results.py", 1
    )


def _gpu(result: dict[str, object]) -> str:
    environment = result["environment"]
    assert isinstance(environment, dict)
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "vllm"))
    return f"One {environment['gpus'][0]['name']}, {versions}"


def _markdown(rows: pd.DataFrame) -> str:
    shown = [
        {
            "window, context": f"{row['requests']}x{row['drafts']}, {row['context']}",
            "way": row["way"],
            "time us": f"{row['time_us']:.2f}",
            "time/as it was": _ratio(row),
            "left MB": f"{row['left_mb']:.1f}",
            "above output MB": f"{row['above_output_mb']:+.1f}",
        }
        for row in rows.to_dict("records")
    ]
    return str(pd.DataFrame(shown).to_markdown(index=False, disable_numparse=True))


def _ratio(row: dict[str, float]) -> str:
    if pd.isna(row["time_over_nwor"]):
        return "1"
    low, high = row["time_over_nwor_low"], row["time_over_nwor_high"]
    return f"{row['time_over_nwor']:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dram", type=Path, required=True, help="what the run printed")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    lines = arguments.dram.read_text(encoding="utf-8").splitlines()
    write_table(arguments.folder, lines, arguments.output)


if __name__ == "__main__":
    main()
