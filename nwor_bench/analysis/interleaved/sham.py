"""Did the A/A arm switch as stage does, so that it shows what switching itself does? Pure."""

from collections import Counter

from nwor_bench.records.cell import SHAM
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase


def sham_windows(run: RunData) -> Counter[str]:
    """Windows of the A/A arm's turns: `SWITCHED`, or by the reason for which they were plain off.

    Empty for runs of older versions, whose A/A arm never switched anything.
    """
    counts: Counter[str] = Counter()
    for event in run.events:
        if event.get("event") == Phase.INTERLEAVED:
            for facts in event["cells"].values():
                counts.update(facts.get(SHAM) or {})
    return +counts
