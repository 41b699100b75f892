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
  context, {tile:.2f} MB for each of two splits at 8 x 4. That it splits in two there and not at all
  at 64 x 8 is an assumption, since a captured graph does not tell; the sums bear it out. Our
  kernel makes partial results too at 8 x 4 (`made`), and drops them from L2 before they are
  written ([partials](partials.md)).
- `FA lse`: the log-sum-exp of each query row and head that FlashAttention writes beside its output.
- `spills`: registers that our kernel spills to local memory, counted in the compiled code
  (`tests/benchmarks/dram_parts.py`): {spilled} a thread of each program that has work.
- `cut windows`: at 64 x 8 a K/V head of a request goes to one program, unless that costs more than
  {whole} % more steps. Where only a few of the requests have passed a multiple of the step's tokens
  it does; the window is then cut, and its partial results leave L2 before they are merged. Such
  windows stand out by {jump} MB each. `cut` counts them, beside how many the rule cuts on average
  where such batches are simulated with the run's acceptance by position.
- `unexplained`: measured less the sum, and in per cent of the measured difference.

Left unexplained over 10 % of the difference: {unexplained}.

- Staged by reference in an eager engine at 64 x 8: the K/V of all layers are held until the commit,
  so that the allocator gives each layer other memory, where stock reuses a layer's for the next.
  Copies hold nothing, and there the sum is right; that this is the reason was not tested. At
  acceptance 0.9 the difference itself is small, too.
- Persist: see below.

What is left at 8 x 4 is small and always of the same sign, outside the measured intervals; as said,
what FlashAttention's splits write is a computed figure.

## Copies kept in L2

{kept}

L2 was set aside for the copies, and the access-policy window covers them all with a hit ratio of
100 %, by what CUDA says. It saved no writes that can be seen, and next to none of the commit's
reads of the accepted copies: they did not stay in L2. Why is not known. They are written inside
CUDA graphs, whose nodes should take the window over from the stream on which they were captured;
that they did was not read back from the graph, and an eager engine was not measured with it.

## Reads

{reads}

Staged by reference, mode stage reads less than the model says, by about the K/V of a window's
tokens: stock's attention takes them from the cache, ours from where the GEMM left them. That this
is the reason was not tested. With copies at 8 x 4 it is less.

## Bytes for each accepted token

{slopes}

Measured: the slope of `write - off` over the acceptances without what cut windows add; +- is what
the intervals at both ends leave open. Model: K and V of one token in all layers.

## Before

The former attention kernel kept its partial results, which left L2 for DRAM between two layers, and
mode stage wrote more than stock (dram-before.csv). `write - off`, MB a window:

{before}
"""
