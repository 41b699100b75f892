"""The planted faults: how each is planted, and which checks must see it.

A fault is planted into the project's own code or state and taken away again. The sweep's real
gate then runs on a real engine, and the checks that saw it are compared with this table:
exactly on the CPU; on a GPU those of `sure` are the least. Which mistake each stands for, and why
those checks see it, is in sweeps/studies/planted-faults/faults.csv.
"""

from dataclasses import dataclass

import planted_commits as commit
import planted_parts as parts
from planted_commits import Plant
from planted_parts import in_states, on_runners, only_in_timed_graphs
from planted_states import (
    IN_FORWARD,
    PLANTS,
    SUBTLE,
    one_heads_gate,
    scaled_at_long_context,
    verify_changed,
)

BOTH = ("stage x off", "stage x graph")
GRAPH_ALONE = ("stage x graph",)
ADAPTIVE = ("stage x adaptive",)
"""Only there windows become ready. Faults of `GpuStaging.commit` cannot be planted there: it runs
vLLM's update too, which may not run twice."""

REAL, SHAPE, STATES = "smollm2", "llama-3b-shape", "tiny-states-mtp"
"""Pairs of the GPU's engines."""

V1, V2 = frozenset({"V1"}), frozenset({"V2"})
NONE: frozenset[str] = frozenset()
K = frozenset({"K/V"})
TOKENS = frozenset({"tokens"})
WRITES = frozenset({"writes"})
COUNTERS = frozenset({"counters"})
ACCEPTANCE = frozenset({"acceptance"})
RANKS = frozenset({"ranks"})
GRAPHS = frozenset({"graphs"})
END_TO_END = frozenset({"states"})
LAYERS = frozenset({"layers"})
"""Seen by the local gate: what a layer writes, or its attention, is not stock's."""

WRONG = K | TOKENS | LAYERS
"""What sees wrong values in slots that are written when they should be."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: its row in docs/planted-faults.md.
        plant: plants it on either runner.
        cpu_checks: exactly what sees it on the CPU with the tiny pair.
        sure: what must see it on any engine.
        cells: the cells in which it shows.
        captured: on a GPU it must be in place when the full CUDA graphs are captured.
        cache_dtype: the GPU's cache that it needs.
        interleaved: it shows in interleaved batches only.
        pairs: GPU engines in which it is planted.
        runners: where it can be planted.
    """

    name: str
    plant: Plant
    cpu_checks: frozenset[str]
    sure: frozenset[str] = K
    cells: tuple[str, ...] = BOTH
    captured: bool = False
    cache_dtype: str = "auto"
    interleaved: bool = False
    pairs: tuple[str, ...] = (REAL, SHAPE)
    runners: frozenset[str] = V1 | V2


FAULTS = (
    Fault("one head of one layer wrong, committed", commit.head_wrong_in_commit, WRONG),
    Fault("one head of one layer wrong, staged", parts.head_wrong_in_staging, WRONG,
          captured=True),
    Fault("one slot too far in the last layer", commit.last_layer_one_slot_on, WRONG | WRITES,
          K | WRITES),
    Fault("one accepted token too few", commit.one_too_few, WRONG | WRITES | COUNTERS, K | WRITES),
    Fault("one accepted token too many",
          on_runners(parts.accepts_one_too_many, commit.one_row_too_many),
          COUNTERS | WRITES | LAYERS, NONE),
    Fault("one accepted token too many, in SCV graph alone",
          on_runners(parts.accepts_one_too_many_in_scv_graph, commit.one_row_too_many_in_scv_graph),
          COUNTERS | WRITES | LAYERS, NONE, GRAPH_ALONE),
    Fault("the rejected drafts committed instead of the accepted", commit.rejected_committed,
          WRONG | WRITES | COUNTERS, K | WRITES),
    Fault("V of two layers swapped", commit.values_of_two_layers_swapped, WRONG),
    Fault("K and V swapped in one layer", commit.key_and_value_swapped, WRONG),
    Fault("a layer skipped in the commit", commit.layer_skipped, WRONG | WRITES, K | WRITES),
    Fault("a commit after the next window has begun", commit.commit_after_the_next_begin,
          WRONG | WRITES | COUNTERS, K | WRITES),
    Fault("slots of two requests swapped", commit.slots_of_two_requests_swapped, WRONG),
    Fault("the certain first token not written",
          on_runners(parts.certain_token_left_out, commit.certain_token_dropped), WRONG),
    Fault("V of one layer rounded to fp8 in a cache that is not fp8",
          on_runners(parts.value_rounded_in_staging, commit.value_rounded_to_fp8), WRONG),
    Fault("a stale scale in an fp8 cache", commit.stale_scale, NONE, cache_dtype="fp8",
          runners=V2),
    Fault("attention reads the cache instead of the staged rows", parts.stale_attention, WRONG,
          captured=True),
    Fault("attention misses the window's last row", parts.last_row_missed, K | LAYERS,
          captured=True),
    Fault("attention misses the window's first staged row", parts.first_row_missed, WRONG,
          captured=True),
    Fault("attention misses each draft's own row", parts.own_row_missed, WRONG, runners=V1),
    Fault("the drafter's rows are not written", parts.drafter_not_written, ACCEPTANCE, ACCEPTANCE,
          runners=V1),
    Fault("counters doubled", parts.counters_doubled, COUNTERS, COUNTERS),
    Fault("staged tokens counted in each layer", parts.counted_in_each_layer, COUNTERS, COUNTERS),
    Fault("every draft written at once and counted as staged", parts.written_directly_in_secret,
          WRITES | LAYERS, WRITES),
    Fault("rejected drafts written too at long context", commit.rejected_written_late, WRITES,
          WRITES, pairs=(SHAPE,)),
    Fault("one row of layer 0 set to 1 at each switch from stage to off",
          commit.one_row_lost_at_a_switch, K | TOKENS, interleaved=True),
    Fault("a ready window skips a layer in its commit", commit.layer_skipped_if_ready, NONE, NONE,
          ADAPTIVE, runners=V2),
    Fault("a ready window writes its first row to the slot before it too",
          commit.row_too_many_if_ready, NONE, NONE, ADAPTIVE, runners=V2),
    Fault("one head of one layer wrong, in the timed graph alone",
          only_in_timed_graphs(parts.head_wrong_in_staging), NONE, GRAPHS, captured=True,
          runners=V2),
    Fault("V of one head 1 % too large at long context", commit.value_wrong_at_long_context,
          K | LAYERS, LAYERS, pairs=(SHAPE,)),
    Fault("16 positions of one request with unrelated K/V", commit.unrelated_rows, K | TOKENS),
    Fault("the second-best token if its gap is under 0.3 nats", parts.second_best, TOKENS, TOKENS,
          pairs=(REAL,)),
)  # fmt: skip

STATE_FAULTS = (
    *(
        Fault(f"states: {name}", in_states(plant), NONE,
              LAYERS if name in SUBTLE else LAYERS | END_TO_END, pairs=(STATES,),
              captured=name in (*IN_FORWARD, "one head's gate"))
        for name, plant in PLANTS.items()
    ),
    Fault("states: one head's gate, in the timed graph alone",
          only_in_timed_graphs(in_states(verify_changed(one_heads_gate))), NONE, GRAPHS,
          captured=True, pairs=(STATES,), runners=V2),
    Fault("states: one layer's 2 % too large at long context", scaled_at_long_context, NONE,
          END_TO_END, pairs=(STATES,)),
)  # fmt: skip
"""Faults of recurrent states: `sure` is what sees them in either runner."""


@dataclass(frozen=True)
class RankFault:
    """A fault on one of two tensor-parallel ranks; `plant` is a name in `rank_faults.PLANTS`."""

    name: str
    plant: str
    checks: frozenset[str]
    cells: tuple[str, ...] = BOTH


RANK_FAULTS = (
    RankFault("one rank commits a row less", "first_accepted_dropped", WRONG | WRITES | RANKS),
    RankFault("one rank counts a token less", "counts_one_less", RANKS, ("off x off", *BOTH)),
)
