"""What the gate compared, and what was timed, in runs of models that draft with their MTP layers.

    python sweeps/studies/mtp/measure.py RUN [RUN ...]      # writes mtp.csv beside this file

A row is the first staged cell of one run folder of `nwor-bench sweep`.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.parity.local import LOCAL_EVENT
from nwor_bench.records.store import read_run


def row_of(folder: Path) -> dict[str, Any]:
    """One run as a row; what was not measured is empty."""
    run = read_run(folder)
    header, cells = run.header, {cell.label: cell for cell in analyse(run).cells}
    cell = next(label for label in cells if label.startswith("stage x "))
    staged, kept = cells[cell], (header.kv_gate.cells or {})[cell]
    gates = [event for event in run.events if event.get("event") == LOCAL_EVENT]
    local = next(event for event in gates if event["nwor_mode"] == "stage")
    return {
        "pair": header.pair.name,
        "gpu": header.environment.gpus[0].name,
        "requests": header.scenario["requests"],
        "layers": header.engine.target_layers,
        "drafter_layers": header.engine.drafter_layers,
        "attention": header.engine.attention_backend,
        "staged_tokens": staged.nwor_total_staged,
        "committed_tokens": staged.nwor_total_committed,
        "fallbacks": staged.nwor_fallback_count,
        "positions_checked": kept["checked"],
        "positions_committed": kept["committed"],
        "kv_verdict": kept["verdict"],
        "attention_error_over_allowed": local["nearest"],
        "groups": staged.groups,
        "ratio_to_off": staged.ratio_to_off,
        "ratio_ci_low": staged.ratio_ci_low,
        "ratio_ci_high": staged.ratio_ci_high,
        "verdict": staged.verdict,
        "verdict_of_off": cells["off x off"].verdict,
    }


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    rows = [row_of(folder) for folder in parser.parse_args().runs]
    pd.DataFrame(rows).to_csv(Path(__file__).with_name("mtp.csv"), index=False)


if __name__ == "__main__":
    main()
