"""The planted faults: what each stands for, how it is planted, and which checks must see it.

A fault is planted into the project's own code or state and taken away again. The sweep's real
gate then runs on a real engine, and the checks that saw it are compared with this table:
exactly on the CPU; on a GPU those of `sure` are the least.
"""

from dataclasses import dataclass

import planted_commits as commit
import planted_parts as parts
from planted_commits import Plant
from planted_parts import in_states, on_runners, only_in_timed_graphs
from planted_states import IN_FORWARD, PLANTS, one_heads_gate, verify_changed

BOTH = ("stage x off", "stage x graph")
GRAPH_ALONE = ("stage x graph",)
ADAPTIVE = ("stage x adaptive",)
"""Only there windows become ready. Faults of `GpuStaging.commit` cannot be planted there: it runs
vLLM's update too, which may not run twice."""

REAL, SHAPE, STATES = "smollm2", "llama-3b-shape", "tiny-states-mtp"
"""Pairs of the GPU's engines."""

V1 = frozenset({"V1"})
V2 = frozenset({"V2"})
K = frozenset({"K/V"})
TOKENS = frozenset({"tokens"})
WRITES = frozenset({"writes"})
COUNTERS = frozenset({"counters"})
ACCEPTANCE = frozenset({"acceptance"})
RANKS = frozenset({"ranks"})
GRAPHS = frozenset({"graphs"})
LAYERS = frozenset({"layers"})
"""Seen by the local gate: what a layer writes, or its attention, is not stock's."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: its row in docs/planted-faults.md.
        stands_for: the mistake in the code that would look like this.
        why: why the checks of `cpu_checks` see it, and the others do not.
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
    stands_for: str
    why: str
    plant: Plant
    cpu_checks: frozenset[str]
    sure: frozenset[str]
    cells: tuple[str, ...] = BOTH
    captured: bool = False
    cache_dtype: str = "auto"
    interleaved: bool = False
    pairs: tuple[str, ...] = (REAL, SHAPE)
    runners: frozenset[str] = V1 | V2


FAULTS = (
    Fault(
        "one head of one layer wrong, committed",
        "a commit that computes one head's offset wrongly",
        "attention reads the head from the next window on, and the cache keeps it; slots are "
        "written when they should be",
        commit.head_wrong_in_commit, K | TOKENS | LAYERS, K,
    ),
    Fault(
        "one head of one layer wrong, staged",
        "staging that copies one head's rows wrongly",
        "attention of the same window reads it, and the commit takes it along",
        parts.head_wrong_in_staging, K | TOKENS | LAYERS, K, captured=True,
    ),
    Fault(
        "one slot too far in the last layer",
        "slots taken from another layer's mapping",
        "the right slots stay empty in one layer alone: tokens, rows and writes differ",
        commit.last_layer_one_slot_on, K | TOKENS | WRITES | LAYERS,
        K | WRITES,
    ),
    Fault(
        "one accepted token too few",
        "a count that forgets the last accepted draft",
        "its slot keeps what stood there, and fewer drafts are written than counted",
        commit.one_too_few, K | TOKENS | WRITES | COUNTERS | LAYERS, K | WRITES,
    ),
    Fault(
        "one accepted token too many",
        "validation that takes a rejected draft for an accepted one",
        "the next window overwrites its slot, so tokens and rows stay right: counts and writes "
        "alone tell",
        on_runners(parts.accepts_one_too_many, commit.one_row_too_many),
        COUNTERS | WRITES | LAYERS, frozenset(),
    ),
    Fault(
        "one accepted token too many, in SCV graph alone",
        "a device kernel that differs from the host's loop",
        "as above, in the one cell whose validation runs on the device",
        on_runners(
            parts.accepts_one_too_many_in_scv_graph, commit.one_row_too_many_in_scv_graph
        ),
        COUNTERS | WRITES | LAYERS, frozenset(), GRAPH_ALONE,
    ),
    Fault(
        "the rejected drafts committed instead of the accepted",
        "an inverted mask",
        "accepted slots keep what stood there; more is written than counted",
        commit.rejected_committed, K | TOKENS | WRITES | COUNTERS | LAYERS,
        K | WRITES,
    ),
    Fault(
        "V of two layers swapped",
        "layers' addresses in the wrong order",
        "every slot is written in time, with another layer's values",
        commit.values_of_two_layers_swapped, K | TOKENS | LAYERS, K,
    ),
    Fault(
        "K and V swapped in one layer",
        "the two halves of a cache row confused",
        "every slot is written in time, with the other half's values",
        commit.key_and_value_swapped, K | TOKENS | LAYERS, K,
    ),
    Fault(
        "a layer skipped in the commit",
        "a loop over layers that ends early",
        "one layer's slots keep what stood there, the other layers' do not",
        commit.layer_skipped, K | TOKENS | WRITES | LAYERS, K | WRITES,
    ),
    Fault(
        "a commit after the next window has begun",
        "a commit on another stream, or too late",
        "slots are filled one window late from rows that are another window's by then",
        commit.commit_after_the_next_begin,
        K | TOKENS | WRITES | COUNTERS | LAYERS, K | WRITES,
    ),
    Fault(
        "slots of two requests swapped",
        "requests ordered differently in the batch and in the plan",
        "as many rows are written as counted, in slots of the other request",
        commit.slots_of_two_requests_swapped, K | TOKENS | LAYERS,
        K,
    ),
    Fault(
        "the certain first token not written",
        "a first token that is taken for a draft",
        "its slot keeps what stood there; writes counts drafts alone",
        on_runners(parts.certain_token_left_out, commit.certain_token_dropped),
        K | TOKENS | LAYERS, K,
    ),
    Fault(
        "V of one layer rounded to fp8 in a cache that is not fp8",
        "a cast through the wrong dtype",
        "three bits of mantissa are far from float32's 23, and far enough from bf16's 7",
        on_runners(parts.value_rounded_in_staging, commit.value_rounded_to_fp8),
        K | TOKENS | LAYERS, K,
    ),
    Fault(
        "a stale scale in an fp8 cache",
        "a commit with the scale of another layer or of an earlier calibration",
        "every value of the layer is half of what it should be",
        commit.stale_scale, frozenset(), K, cache_dtype="fp8", runners=V2,
    ),
    Fault(
        "attention reads the cache instead of the staged rows",
        "the first published NWOR: the write is skipped, and nothing replaces the read",
        "drafts attend to what stood in their slots, so what they compute is wrong",
        parts.stale_attention, K | TOKENS | LAYERS, K, captured=True,
    ),
    Fault(
        "attention misses the window's last row",
        "an end that is one too small",
        "the last draft alone lacks itself: its rows in later layers are wrong where it is "
        "accepted, and few tokens depend on it",
        parts.last_row_missed, K | LAYERS, K, captured=True,
    ),
    Fault(
        "attention misses the window's first staged row",
        "a start that is one too large",
        "every draft of the window lacks a row beside it",
        parts.first_row_missed, K | TOKENS | LAYERS, K, captured=True,
    ),
    Fault(
        "attention misses each draft's own row",
        "a causal mask that is strict",
        "a row has much of its attention for itself",
        parts.own_row_missed, K | TOKENS | LAYERS, K, runners=V1,
    ),
    Fault(
        "the drafter's rows are not written",
        "a drafter's layer that is taken for one of the target's",
        "the target verifies every draft, so tokens and its rows are right; drafts get worse",
        parts.drafter_not_written, ACCEPTANCE, ACCEPTANCE, runners=V1,
    ),
    Fault(
        "counters doubled",
        "a window that is recorded twice",
        "the windows' counts are twice vLLM's",
        parts.counters_doubled, COUNTERS, COUNTERS,
    ),
    Fault(
        "staged tokens counted in each layer",
        "stage operations taken for tokens",
        "as above, and stage operations no longer are tokens x layers",
        parts.counted_in_each_layer, COUNTERS, COUNTERS,
    ),
    Fault(
        "every draft written at once and counted as staged",
        "a mode that never saves a write: INEFFECTIVE, but not by its counts",
        "tokens, rows and counts are right; only the watched slots tell",
        parts.written_directly_in_secret, WRITES | LAYERS, WRITES,
    ),
    Fault(
        "the last commit's rows zeroed at each switch from stage to off",
        "a switch that undoes what the cell before it has committed",
        "whole batches of one cell never switch: only the gate's interleaved batch has the fault",
        commit.rows_lost_at_a_switch, K | TOKENS, K, interleaved=True,
    ),
    Fault(
        "one row of layer 0 set to 1 at each switch from stage to off",
        "a switch that writes to one slot too many",
        "as above; a row of ones is about as far from the right one as that is long",
        commit.one_row_lost_at_a_switch, K | TOKENS, K,
        interleaved=True,
    ),
    Fault(
        "a ready window skips a layer in its commit",
        "a launch that is bound once and used again",
        "a path that no watched batch takes: the gate's last batch alone has it",
        commit.layer_skipped_if_ready, frozenset(), frozenset(), ADAPTIVE, runners=V2,
    ),
    Fault(
        "a ready window writes its first row to the slot before it too",
        "a launch that is bound to one row too many",
        "as above",
        commit.row_too_many_if_ready, frozenset(), frozenset(), ADAPTIVE, runners=V2,
    ),
    Fault(
        "one head of one layer wrong, in the timed graph alone",
        "a capture that differs from the gate's own capture of the same forward",
        "layers are checked in a graph of the gate's own; the timed one is compared with it",
        only_in_timed_graphs(parts.head_wrong_in_staging), frozenset(), GRAPHS,
        captured=True, runners=V2,
    ),
    Fault(
        "V of one head 1 % too large at long context",
        "a kernel's branch for long contexts",
        "bits of rows that are written differ from stock's in windows with such a request",
        commit.value_wrong_at_long_context, K | LAYERS, LAYERS,
        pairs=(SHAPE,),
    ),
    Fault(
        "16 positions of one request with unrelated K/V",
        "a block that another request was given too",
        "the cache keeps them, and attention reads them; what each layer does in a window is right",
        commit.unrelated_rows, K | TOKENS, K,
    ),
    Fault(
        "the second-best token if its gap is under 0.3 nats",
        "logits of a row that are rounded once more",
        "K/V are those of the tokens that were taken; each token alone could be a tie",
        parts.second_best, TOKENS, TOKENS, pairs=(REAL,),
    ),
)  # fmt: skip


def _of_states(name: str, stands_for: str, why: str) -> Fault:
    return Fault(
        f"states: {name}", stands_for, why, in_states(PLANTS[name]), frozenset(), LAYERS,
        captured=name in (*IN_FORWARD, "one head's gate"), pairs=(STATES,),
    )  # fmt: skip


SAME_INPUTS = "a layer's states and outputs are compared with stock's on the same inputs"

STATE_FAULTS = (
    _of_states("one too few", "a count that forgets the last accepted draft", SAME_INPUTS),
    _of_states("one too many", "a count that takes a rejected draft", SAME_INPUTS),
    _of_states("a rejected position", "a commit that ignores the counts", SAME_INPUTS),
    _of_states("a rejected draft's state", "a read of the next column", SAME_INPUTS),
    _of_states("another request's record", "records in another order than requests", SAME_INPUTS),
    _of_states("one head's update", "one head's record rounded once more", SAME_INPUTS),
    _of_states("one head's gate", "one head's decay rounded", SAME_INPUTS),
    _of_states(
        "one head's beta in front of the trace",
        "our wrapper changes an input before the gate copies it",
        "the gate copies what vLLM passed, in front of our wrapper",
    ),
    _of_states("a stale slot", "a source that is one window old", SAME_INPUTS),
    _of_states("never committed", "a commit that is not launched", SAME_INPUTS),
    _of_states("a token short", "a window that starts one token late", SAME_INPUTS),
    _of_states("wrong group", "another KV-cache group's slots", SAME_INPUTS),
    _of_states("convolution a token short", "a convolution that starts late", SAME_INPUTS),
    Fault(
        "states: one head's gate, in the timed graph alone",
        "a capture that differs from the gate's own",
        "layers are checked in a graph of the gate's own; the timed one is compared with it",
        only_in_timed_graphs(in_states(verify_changed(one_heads_gate))), frozenset(), GRAPHS,
        captured=True, pairs=(STATES,), runners=V2,
    ),
)  # fmt: skip
"""Faults of recurrent states: `sure` is what sees them in either runner."""


@dataclass(frozen=True)
class RankFault:
    """A fault on one of two tensor-parallel ranks; `plant` is a name in `rank_faults.PLANTS`."""

    name: str
    stands_for: str
    why: str
    plant: str
    checks: frozenset[str]
    cells: tuple[str, ...] = BOTH


RANK_FAULTS = (
    RankFault(
        "one rank commits a row less",
        "ranks that settle on one count and write another",
        "half the heads of a slot keep what stood there; the other rank is right",
        "first_accepted_dropped", K | TOKENS | WRITES | RANKS | LAYERS,
    ),
    RankFault(
        "one rank counts a token less",
        "ranks that record different windows",
        "output and rows are right; the ranks' windows differ",
        "counts_one_less", RANKS, ("off x off", *BOTH),
    ),
)  # fmt: skip
