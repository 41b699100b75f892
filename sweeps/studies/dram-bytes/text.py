"""The text of README.md around the tables of `page.py`."""

TEXT = """# DRAM bytes a window, by the GPU's own counters

{answer}

{commands}

{machine}; runs are from several hosts with such GPUs. A difference from off is within one
engine; one between two runs (persist and copy, 1split and default splits, emptied and not) is not.

Llama-3.2-3B's shape, random weights, synthetic acceptance (the run's last number is the share),
prompts of 1,024 tokens. Runs are named graphs-(way to stage)-requests x drafts-acceptance.
All figures and intervals are in [dram.csv.gz](dram.csv.gz).{left_out}

## What stock moves

{stock}

A window in off x off, and off x off against itself on the same windows (A/A) with the 95 %
interval: the noise. In runs named hold the A/A arm holds K/V, see below. `- off` is always the
difference from off x off on the same windows.

## What the difference in writes is made of

MB a window, mode stage less stock:

{parts}

- `K/V`: what the byte model of `nwor-bench plan` says for the drafts' K/V: rejected ones are not
  written, and copies into a buffer are, unless they stay in L2. This alone is what
  no-write-on-reject does; the next columns are what replacing the attention kernel does.
- `FA splits`: the float32 partial results that stock FlashAttention 3 writes where it splits a
  context, {tile:.2f} MB for each of two splits at 8 x 4. Its scheduler says that it splits in two
  there and not at all at 64 x 8, and by itself it leaves that many bytes
  ([attention](../dram-kernels/README.md)). Our kernel makes partial results too at 8 x 4 (`made`),
  and drops them from L2 before they are written ([partial results](../partial-results/README.md)).
- `FA lse`: the log-sum-exp of each query row and head that FlashAttention writes beside its output.
- `spills`: registers that our kernel spills to local memory, counted in the compiled code
  (`parts.py`): {spilled} a thread of each program that has work.
- `cut windows`: at 64 x 8 a K/V head of a request goes to one program, unless that costs more than
  {whole} % more steps. Where only a few of the requests have passed a multiple of the step's tokens
  it does; the window is then cut, and its partial results leave L2 before they are merged. Such
  windows stand out by {jump} MB each. `cut` counts them, beside how many the rule cuts on average
  where such batches are simulated with the run's acceptance by position. What they write more is
  measured, not modelled, so it leaves nothing to explain.
- `unexplained`: measured less the sum, beside half the measured interval, and in per cent of the
  measured difference. Most of a difference is the attention kernel's: at 8 x 4 and acceptance 0.9
  what is left is as large as NWOR's own part, and only the slope over acceptances bears it out.

Runs named 1split, emptied, engine2 to 4 and hold test an explanation; in hold nothing is staged.

Unexplained by over 10 % of the difference: {over_tenth}.

Unexplained by more than the interval: {outside}.

- **8 x 4**: {small_left} MB of 224 are left, all above 0; why is not known. Held to one split,
  stock and stage differ by {no_splits} MB where the model says {no_splits_model}. What splits
  leave inside an engine is thus {splits_left} MB, which may be all of it or not.
- **64 x 8, eagerly, by reference**: it changes with the allocator's state, see below.
- **Persist**: see below. As plain copies these runs are explained as those are.

### Eager engines: which memory a step is given

In an eager engine PyTorch's allocator gives each activation its memory, by what ran before. An
activation whose memory is written again while L2 still holds it never reaches DRAM.
MB that a window writes at 64 x 8:

{memory}

Stock itself writes {stock_levels} MB in windows of the same work, depending on the engine and
on what else it ran. Holding all K/V until the next step (the prefill's too, which staging does
not), and staging nothing, adds {held} MB at 64 x 8 and {held_small} at 8 x 4
(`measure_held.py`; a [576, 3072] activation takes {activation} MB). Giving PyTorch's cached memory
back before each batch, and nothing else, moves stage's figure by {moved}
(`emptied`). So the allocator's state makes differences of this size, in stock as in stage;
that it is all of what is left was not shown. Copies hold nothing: {copies_left} MB are left of
theirs. In full graphs all memory has its place once and for all.

## Copies kept in L2

{kept}

L2 was set aside for the copies, and the access-policy window covers them all with a hit ratio of
100 %, by what CUDA says. Nothing was saved, so the option for it was removed.

## Reads

{reads}

- `K/V, model`: the commit reads the accepted drafts back, and by reference each request's certain
  first token with them.
- `kernels, alone`: what our attention reads less than stock's write and attention, measured by
  themselves ([attention](../dram-kernels/README.md)): kernel code at 8 x 4; at 64 x 8 queries, the
  window's K/V and outputs, which stock's fewer programs at once find pushed out of L2 more often.
- Unexplained, MB of 11,700 at 8 x 4 and of 26,000 at 64 x 8: in full graphs {reads_small} and
  {reads_big}, eagerly {reads_eager_small} and {reads_eager}.
- Persist's copies count as kept in this model, and were not. In 1split stock launches no merge.

## Bytes for each accepted token

{slopes}

Measured: the slope of `write - off` over the acceptances without what cut windows add; +- is what
the intervals at both ends leave open. Model: K and V of one token in all layers.

## Before

The former attention kernel kept its partial results, which left L2 for DRAM between two layers, and
mode stage wrote more than stock ([before.csv](before.csv)). `write - off`, MB a window:

{before}
"""
