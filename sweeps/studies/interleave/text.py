"""The text of README.md around the tables of `page.py`."""

TEXT = """# How precise is a comparison within one batch?

Off x off against itself is known to +- {best:.3f} % after 48 s at 8 requests, and to
+- {worst:.2f} % at worst (256 requests, fp8 cache). A spin of {planted} % on the device is measured
as {found:+.3f} +- {found_half:.3f} %. In 20 pieces of 2.4 s it is called slower in {slower} of 20,
in runs of their own in {clear_slower} of {each} where the device sets the pace, in {hidden_slower}
of {each} where the host does.

    python sweeps/studies/interleave/measure.py 8 64 256 8:device 8:host --seconds 48 --output DIR
    python sweeps/studies/interleave/measure.py 8 64 256 --cache-dtype fp8 --seconds 45 --output DIR
    nwor-bench sweep --file sweeps/h200-split.toml

Two NVIDIA H200 of one host (vLLM 0.32.0, torch 2.11, Triton 3.6), each with one process; clocks not
locked. Llama-3.2-3B's shape, k = 4, synthetic acceptance of 2.6 tokens a window, full CUDA graphs,
1,024 tokens of context (256 with 256 requests). [groups.csv.gz](groups.csv.gz) has every group,
[cells.csv](cells.csv) the runs; `compact.py` made both, `page.py` this page.

## Off x off against itself

Per cent of a window's time, with half the 95 % interval; the aim was 0.2 % in 60 s.

{aa}

The two clocks differ because the host runs ahead of the device: what makes it late for one window
is caught up in the next. Ratios are those of the device's clock. "Together" is the rank correlation
of the groups' effects on both clocks; near 1 the device waits for the host.

## Does a longer run of windows give another result?

A run's first window is left out. If something were left behind in caches, the effect would change
with the length of a run. Off x off against itself, device's clock, 8 requests, per cent:

{lengths}

## Planted slow-downs

At 8 requests; each of the {chunks} pieces has its own interval. "Inside": the truth lies in it.

{pieces}

A host's wait of {planted} % (15 us) costs nothing there: the device sets the pace, and the host
catches up. The truth of that row is therefore 0.

    python sweeps/studies/interleave/measure.py 8:none+device --runs 20 --seconds 15 --output DIR
    python sweeps/studies/interleave/measure.py 8:none+device --context 24576 --tokens 2048 \\
      --runs 20 --seconds 13 --output DIR

Runs of their own, {each} for each command, on two machines of one H200 with 16 processors; both
arms in each run ([planted.csv](planted.csv)). "Half-width": of the interval, per cent.

{runs}

With 1,024 tokens of context the host set the pace and the device waited: windows took up to twice
the time that the first host needed, and both clocks scatter alike. A spin is then hidden, as the
host's wait is above: it was called slower in {hidden_slower} of {each} runs. With 24,576 tokens
attention keeps the device busy: there it was called slower in {clear_slower} of {each}, each known
to +- {clear_half:.2f} % or better. Off x off was called something else in {idle_called} of {idle}
runs. So {planted} % is found where the device sets the pace; where the host does, intervals are
wide and the run says so.

## Windows against whole batches

8 requests, 50 s a run; three whole batches of every cell. Ratio to off x off:

{agreement}

All six agree. The interval of three whole batches is {wider:.0f} times as wide for stage x graph.

## What stage x graph is made of

`control` has the attention of stage and the writes of off. Per cent of a window's time, 8 requests:

{split}

With an fp8 cache two thirds of the gain are writes: stock's write kernel takes twice as long there,
since it quantises.

## By model, batch, cache and acceptance

    nwor-bench sweep --file sweeps/h200-split.toml       # 3B: acceptance 1.4, 2.6 and 4.2
    nwor-bench sweep --file sweeps/h200-families.toml    # the others

Another host with two H200, a later version of the plugin, 21 to 150 s a run, one run on each GPU
(tests ran on the other one beside Gemma's). The others ran with 66,560 tokens a step, where the
file now has 16,384: prefills differ, windows do not. Per cent of a window's time; the three columns
are estimated apart and add up only within their intervals.

- **Not writing takes time off** in {writes_pay} of the {settings} runs of this section, the next
  three and of real text. It adds time in {writes_cost} ({costs} %), in which the host sets
  the pace; in the rest 0 is possible.
- **The other attention kernel** takes time off for the dense models and gpt-oss. For Qwen3-30B-A3B
  (8 query heads a K/V head) and for latent attention it cost more than the writes save. Both were
  changed after that, see below.

{by_setting}

Noise: half the interval of off x off against itself. At 8 requests the SM clock was 1,965 to 1,980
MHz; at 64 the power cap moved it between {slowest} and {fastest} MHz.

**Whole batches beside them.** At 8 requests two whole batches of every cell of the dense models
and of gpt-oss came within {apart:.2f} % of the windows ({points} ratios in {batch_settings}
settings; two batches give no interval). Where there were three, on any host of this page, their
interval holds the ratio of the windows in {held} of {intervals} cells of {interval_settings}
settings. It is often wide: at 64 and more requests, and on busy hosts, whole batches scatter by
several per cent.

## 256 requests, and 8,192 tokens of context

    nwor-bench sweep --file sweeps/h200-split-256.toml
    nwor-bench sweep --file sweeps/h200-split-8k.toml

Two other H200, whose host was busy. At 256 requests runs of 210 s with 768 tokens a request:
prompts of 256 x 1,024 tokens leave room for few groups ({fewest} to {groups}), and the power cap
held the clock down. At 8k runs of half a minute.

{large}

No interval of stage x graph is as narrow as +- 0.3 %. With a long context attention is most of what
a layer reads, and the bf16 cache's writes are the only gain.

## Attention tuned since

    nwor-bench sweep --file sweeps/h200-families.toml

Launch rules measured anew, and over
FlashAttention's MLA a window is merged into what stock attends (FlashAttention 3 for the committed
tokens, one small kernel for the rest). Two more hosts with two H200 each; the other GPU was in use;
budgets of 75 s for Qwen3 and 60 s for DeepSeek, whose runs so have fewer groups.

{tuned}

DeepSeek-lite at 64 requests ended after one block: {few:.0f} groups say {few_say:+.1f} %, without
an interval. It ran again, for 130 s: next section. Latent attention still costs more than its
writes save.

## Latent attention at 64 requests, and 8,192 tokens where the host sets the pace

    nwor-bench sweep --file sweeps/h200-families.toml    # DeepSeek, with a budget of 130 s
    nwor-bench sweep --file sweeps/h200-split-8k.toml    # with 4 blocks at least, 95 s a run

One H200 of a slow host (20 million additions in a Python loop took it 1.6 s), nothing beside it.

{paced}

At 64 requests DeepSeek's windows take 13 ms, most of it on the device, which the power cap held
back. At 8k the device needs less time for a window than this host: windows took 7 to 10 ms, the run
says that the host sets the pace, and staging's work on the host shows. So the gains at 8k of the
table before do not hold there: both rows are slower; stage x graph with fp8 lies within the run's
noise.

## By the size of the model

    nwor-bench sweep --file sweeps/h200-split-8b.toml
    nwor-bench sweep --file sweeps/h200-families.toml    # gpt-oss, with a budget of 165 s

Per cent of a window's time, bf16, 1,024 tokens of context, 2.6 tokens a window; 8B and gpt-oss at
64 requests on another host with two H200, the other GPU in use. `plan` is the most of a step's DRAM
bytes that not writing could save.

{sizes}

The gain shrinks with the model: weights take longer, and what staging takes away does not grow with
them. At 8 requests writes come to far more than their bytes. Stock launches a write a layer, and
those launches go; so bytes are no prediction of time there. The 8B shape at 64 requests ran for
45 s, which gave {short} groups and none for the split; the power cap held the clock at {low} to
{high} MHz.

## Real text

    nwor-bench sweep --file sweeps/h200-smollm2.toml

SmolLM2-135M with its EAGLE head and real prompts, 8 requests, bf16, 30 blocks, one H200. The run
was cut in its last probe, after all its blocks. Ratio to off x off:

{real_text}

Windows took about 6 ms: the model is so small that the host sets the pace. Staging costs time
there: attention {real_attention} %, writes {real_writes} %. Three whole batches of off x off were
{drift} % apart from three others.

## Again, on a busy host

The 3B shape on other H200s, two processes side by side. At 8 requests the result holds, and windows
agree with three whole batches in all six cells. At 64 requests the host's processors were busy:
windows took 9 to 14 ms where the device needs 8.5, and off x off against itself is known to no
better than 1 to 2.5 %.

{again}

## What was not measured

No 70B shape on four GPUs, and no tensor parallel run window by window on GPUs. Twenty planted runs
at 1,024 tokens of context on a host that keeps up with the device: there each planted part ran
once, in pieces of 2.4 s.
"""
