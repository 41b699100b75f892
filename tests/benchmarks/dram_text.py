"""The words of dram.md, around the tables that `dram_report.py` makes."""

TEXT = """# DRAM bytes a window, by the GPU's own counters

{commands}

{machine}.

Llama-3.2-3B's shape, random weights, drafts accepted by the dice (the run's last number is the
share), prompts of 1,024 tokens. Runs are named graphs-(way to stage)-requests x drafts-acceptance.
All columns and intervals are in dram.csv, the counted windows under dram/.{left_out}

## What was measured

{measured}

`- off` is the difference from off x off on the same windows, with its 95 % interval; off x off
against itself (A/A) shows the noise.

## What the difference in writes is made of

MB a window, mode stage less stock:

{parts}

- `K/V`: what the byte model of `nwor-bench plan` says for the drafts' K/V: rejected ones are not
  written, and copies into a buffer are, unless they stay in L2. This alone is what
  no-write-on-reject does; the next columns are what replacing the attention kernel does.
- `FA splits`: the float32 partial results that stock FlashAttention 3 writes where it splits a
  context, {tile:.2f} MB for each of two splits at 8 x 4. Its scheduler says that it splits in two
  there and not at all at 64 x 8, and by itself it leaves that many bytes
  ([attention-dram](attention-dram.md)). Our kernel makes partial results too at 8 x 4 (`made`), and
  drops them from L2 before they are written ([partials](partials.md)).
- `FA lse`: the log-sum-exp of each query row and head that FlashAttention writes beside its output.
- `spills`: registers that our kernel spills to local memory, counted in the compiled code
  (`tests/benchmarks/dram_parts.py`): {spilled} a thread of each program that has work.
- `cut windows`: at 64 x 8 a K/V head of a request goes to one program, unless that costs more than
  {whole} % more steps. Where only a few of the requests have passed a multiple of the step's tokens
  it does; the window is then cut, and its partial results leave L2 before they are merged. Such
  windows stand out by {jump} MB each. `cut` counts them, beside how many the rule cuts on average
  where such batches are simulated with the run's acceptance by position.
- `unexplained`: measured less the sum, and in per cent of the measured difference.

Runs named 1split, emptied, engine2 to 4 and hold test an explanation; in hold nothing is staged.

Unexplained by over 10 % of the difference: {over_tenth}.

Unexplained by more than the interval: {outside}.

- **8 x 4**: {small_left} MB of 224 are left, mostly of one sign. It is what splits leave: held to
  one split, stock and stage differ by {no_splits} MB, and the model says {no_splits_model}.
  Inside an engine splits thus leave {splits_left} MB.
- **64 x 8, eagerly, by reference**: it is the memory that an eager step is given, see below.
- **Persist**: see below. As plain copies these runs are explained as those are.

### Eager engines: which memory a step is given

An activation whose memory is written again while L2 still holds it never reaches DRAM. In an eager
engine PyTorch's allocator decides that, by what ran before. MB that a window writes at 64 x 8:

{memory}

Over engines and runs stock itself writes {stock_levels} MB in windows of the same work. To
hold all layers' K/V until the next step, and do nothing else, adds {held} MB to that
(`dram_hold.py`; a [576, 3072] activation takes {activation} MB). To give PyTorch's cached memory
back before each batch, and do nothing else, moves stage's figure by {moved}
(`emptied`). So staging by reference, which holds K/V, may differ from stock by some MB
for reasons that have nothing to do with what it stages. Copies hold nothing: {copies_left} MB are
left of theirs. That single lines are overwritten in L2 was not itself observed. In full graphs all
memory has its place once and for all.

## Copies kept in L2

{kept}

L2 was set aside for the copies, and the access-policy window covers them all with a hit ratio of
100 %, by what CUDA says; captured graphs' nodes hold the window, too. Nothing was saved, because
this L2 lets persisting lines go as well: none is left after two layers' weights, however it is
asked ([l2-persistence](l2-persistence.md)). A window's copies would have to stay for 28 layers.

## Reads

{reads}

- `K/V, model`: the commit reads the accepted drafts back, and by reference each request's certain
  first token with them.
- `kernels, alone`: what our attention reads less than stock's write and attention, measured by
  themselves ([attention-dram](attention-dram.md)): kernel code at 8 x 4; at 64 x 8 queries, the
  window's K/V and outputs, which stock's fewer programs at once find pushed out of L2 more often.
- Left over, MB: {reads_small} in full graphs at 8 x 4, {reads_eager} eagerly at 64 x 8. Not
  explained: {reads_big} in full graphs at 64 x 8, of 26,000, and {reads_eager_copy} eagerly by
  copy at 8 x 4.
- Persist's copies count as kept in this model, and were not. In 1split stock launches no merge.

## Bytes for each accepted token

{slopes}

Measured: the slope of `write - off` over the acceptances without what cut windows add; +- is what
the intervals at both ends leave open. Model: K and V of one token in all layers.

## Before

The former attention kernel kept its partial results, which left L2 for DRAM between two layers, and
mode stage wrote more than stock (dram-before.csv). `write - off`, MB a window:

{before}
"""
