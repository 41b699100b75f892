"""`nwor-bench sweep`: the command line of a sweep, and nothing else."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.errors import ConfigError

Text = str | None
Whole = int | None
Number = float | None

WORKLOAD = "Workload (default: the scenario's value)"
MODELS = "Models"
MODES = "Modes"
PRECISION = "When to stop"
FILES = "Files"
PROFILING = "Profiling"
VLLM = "vLLM"


def sweep(
    context: typer.Context,
    scenario: Annotated[
        str, typer.Option(help="A scenario's name, or the path of a scenario's .toml file.")
    ] = "short",
    pair: Annotated[
        Text, typer.Option(help="A model pair's name or .toml file (default: smollm2).",
                           rich_help_panel=MODELS)
    ] = None,
    target_model: Annotated[
        Text, typer.Option(envvar="TARGET_MODEL", rich_help_panel=MODELS,
                           help="A local folder or hub name, instead of --pair.")
    ] = None,
    draft_model: Annotated[
        Text, typer.Option(envvar="DRAFT_MODEL", rich_help_panel=MODELS,
                           help="The drafter: a local folder or hub name.")
    ] = None,
    method: Annotated[
        Text, typer.Option(help="How to draft: ngram, draft_model, eagle or eagle3.",
                           rich_help_panel=MODELS)
    ] = None,
    nwor_modes: Annotated[
        str, typer.Option(help="off, stage: where drafts' K/V goes.", rich_help_panel=MODES)
    ] = "off,stage",
    scv_modes: Annotated[
        str, typer.Option(help="off, graph, adaptive: who validates.", rich_help_panel=MODES)
    ] = "off,graph,adaptive",
    stage_by: Annotated[
        str, typer.Option(help="reference, copy: how a GPU holds drafts' K/V while staged.",
                          rich_help_panel=MODES)
    ] = "reference",
    stage_l2: Annotated[
        str, typer.Option(help="normal, persist: ask for copies to stay in L2 (an H200's do not).",
                          rich_help_panel=MODES)
    ] = "normal",
    requests: Annotated[
        Whole, typer.Option(help="Requests a batch.", rich_help_panel=WORKLOAD)
    ] = None,
    batches: Annotated[
        Whole, typer.Option(help="Timed blocks (with --ci-width: at least).",
                            rich_help_panel=WORKLOAD)
    ] = None,
    warmup: Annotated[
        Whole, typer.Option(help="Untimed batches first, at least: more until times are steady.",
                            rich_help_panel=WORKLOAD)
    ] = None,
    draft_tokens: Annotated[
        Whole, typer.Option(help="Drafts a request and window.", rich_help_panel=WORKLOAD)
    ] = None,
    max_new_tokens: Annotated[
        Whole, typer.Option(help="Tokens to generate a request.", rich_help_panel=WORKLOAD)
    ] = None,
    temperature: Annotated[
        Number, typer.Option(help="0 is greedy.", rich_help_panel=WORKLOAD)
    ] = None,
    max_model_len: Annotated[
        Whole, typer.Option(help="Prompt plus output, tokens.", rich_help_panel=WORKLOAD)
    ] = None,
    max_warmup: Annotated[
        Whole, typer.Option(help="Untimed batches at most (default: 15).",
                            rich_help_panel=PRECISION)
    ] = None,
    ci_width: Annotated[
        Text, typer.Option(help="Stop when every interval is within +- this much, e.g. 0.5%.",
                           rich_help_panel=PRECISION)
    ] = None,
    max_blocks: Annotated[
        Whole, typer.Option(help="Timed blocks at most, with the above or below (default: 200).",
                            rich_help_panel=PRECISION)
    ] = None,
    time_budget: Annotated[
        Text, typer.Option(help="Time in timed batches at most, e.g. 60s, 5m.",
                           rich_help_panel=PRECISION)
    ] = None,
    seed: Annotated[
        Whole, typer.Option(help="Seed of prompts, order, sampling (default: 0).",
                            rich_help_panel=WORKLOAD)
    ] = None,
    dtype: Annotated[
        Text, typer.Option(help="auto, bfloat16, float16 or float32 (default: the pair's).",
                           rich_help_panel=VLLM)
    ] = None,
    block_size: Annotated[
        Whole, typer.Option(help="Tokens a cache block.", rich_help_panel=VLLM)
    ] = None,
    kv_cache_gib: Annotated[
        Number, typer.Option(help="KV-cache size (default: what the requests need).",
                             rich_help_panel=VLLM)
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Ranks that share the target.", rich_help_panel=VLLM)
    ] = 1,
    speculative_config: Annotated[
        Text, typer.Option(help="vLLM's JSON, on top of the pair's.", rich_help_panel=VLLM)
    ] = None,
    engine_args: Annotated[
        Text, typer.Option(help="More arguments of vLLM's LLM(), as JSON.", rich_help_panel=VLLM)
    ] = None,
    output: Annotated[
        Text, typer.Option(help="Run folder (default: runs/TIME-SCENARIO-PAIR).",
                           rich_help_panel=FILES)
    ] = None,
    resume: Annotated[
        Text, typer.Option(help="Go on with the run (or sweep) in this folder.",
                           rich_help_panel=FILES)
    ] = None,
    file: Annotated[
        Text, typer.Option(help="A sweep file (sweeps/*.toml): many runs, one engine where one "
                                "will do.", rich_help_panel=FILES)
    ] = None,
    continue_on_error: Annotated[
        bool, typer.Option("--continue-on-error", rich_help_panel=FILES,
                           help="With --file: go on with the next run when one fails.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", rich_help_panel=FILES,
                           help="With --file: on a Ray cluster (RAY_ADDRESS, else this machine), "
                                "one engine a GPU.")
    ] = False,
    github_summary: Annotated[
        bool, typer.Option("--github-summary", rich_help_panel=FILES,
                           help="Append the report to the job's summary on GitHub.")
    ] = False,
    dram_counters: Annotated[
        bool, typer.Option("--dram-counters", rich_help_panel=PROFILING,
                           help="Count DRAM bytes a window, in passes of their own (GPU).")
    ] = False,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", rich_help_panel=PROFILING,
                           help="Name sweep, cells, batches and windows for a profiler.")
    ] = False,
    prometheus_port: Annotated[
        Whole, typer.Option(help="Serve the counters at this port's /metrics; 0: a free one.",
                            rich_help_panel=PROFILING)
    ] = None,
    prometheus_address: Annotated[
        Text, typer.Option(help="Serve them at this address (default: 127.0.0.1, this machine "
                                "alone; 0.0.0.0: every interface).", rich_help_panel=PROFILING)
    ] = None,
    prometheus_textfile: Annotated[
        Text, typer.Option(help="Write the counters for node exporter's textfile collector.",
                           rich_help_panel=PROFILING)
    ] = None,
    launch_counts: Annotated[
        bool, typer.Option("--launch-counts", rich_help_panel=PROFILING,
                           help="Count launches and host waits a window, in one more block.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and stop.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Leave vLLM's log on the terminal.")
    ] = False,
) -> None:  # fmt: skip
    """Sweep NWOR x SCV over one model pair, in one engine.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 correctness broken,
    130 interrupted (what was measured is kept).
    """
    from nwor_bench.engine.preload import run_under_one_openmp
    from nwor_bench.workload.config import Overrides, load_scenario, resolve

    run_under_one_openmp()
    from nwor_bench.instruments.cupti_library import run_under_own_cupti
    from nwor_bench.run.counters_wanted import counters_wanted

    if counters_wanted(dram_counters, resume, file):
        run_under_own_cupti()
    from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted, switch_on

    if nvtx:
        switch_on()
    else:
        ranges_if_wanted()  # refuse VLLM_NWOR_NVTX before anything starts
    from nwor_bench.report.prometheus import sweep_metrics
    from nwor_bench.run.prepare import PairChoice, resume_one, run_one

    given = _given(context)
    if output == "":
        raise ConfigError.for_field("--output", output, "name a new folder")
    folder = None if output is None else Path(output)
    textfile = None if prometheus_textfile is None else Path(prometheus_textfile)
    metrics = context.with_resource(
        sweep_metrics(
            prometheus_port, textfile, typer.echo, address=prometheus_address, dry_run=dry_run
        )
    )
    how: dict[str, Any] = {"dry_run": dry_run, "verbose": verbose, "on_batch": metrics}
    if github_summary:
        from nwor_bench.report.github import append_github_summary, github_summary_file

        github_summary_file()  # refuse before anything is measured
        how["publish"] = append_github_summary
    if file is not None or (resume is not None and (Path(resume) / "sweep.json").is_file()):
        from nwor_bench.run.sweep_prepare import check_flags, resume_sweep, run_sweep

        check_flags(given)
        how |= {"continue_on_error": continue_on_error, "ray": ray}
        if ray:
            from nwor_bench.run.ray.sweep import check_flags_for_ray

            check_flags_for_ray(given)
        if resume is None:
            raise typer.Exit(run_sweep(Path(str(file)), folder, **how))
        raise typer.Exit(resume_sweep(Path(resume), None if file is None else Path(file), **how))
    for flag, is_on in (("--continue-on-error", continue_on_error), ("--ray", ray)):
        if is_on:
            raise ConfigError.for_field(flag, True, "it needs --file")
    if resume is not None:
        raise typer.Exit(resume_one(Path(resume), given, **how))

    spec = resolve(
        load_scenario(scenario),
        Overrides(
            requests=requests,
            batches=batches,
            warmup=warmup,
            draft_tokens=draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            max_model_len=max_model_len,
            seed=seed,
        ),
        nwor_modes=nwor_modes,
        scv_modes=scv_modes,
        dtype=dtype,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        speculative_config=speculative_config,
        engine_args=engine_args,
        kv_cache_gib=kv_cache_gib,
        ci_width=ci_width,
        max_blocks=max_blocks,
        time_budget=time_budget,
        max_warmup=max_warmup,
        dram_counters=dram_counters,
        launch_counts=launch_counts,
        stage_by=stage_by,
        stage_l2=stage_l2,
    )
    choice = PairChoice(pair, target_model, draft_model, method)
    raise typer.Exit(run_one(spec, choice, folder, **how))


def _given(context: typer.Context) -> dict[str, Any]:
    """What was written on the command line, by parameter name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }
