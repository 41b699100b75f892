-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view kept
SELECT *, replace(pair, '-shape', '') AS model, CASE WHEN compile_mode IS NULL THEN 'default' ELSE 'none' END AS compilation,
  pair || requests || vllm || coalesce(compile_mode, '') AS run, vllm LIKE '0.32%' AS old,
  compile_mode IS NOT NULL AND pair <> 'qwen3.5-quarter-shape' AS twice
FROM cells;

-- view staged
SELECT *, fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS step,
  CASE WHEN work_ratio IS NULL THEN fmt('{:+.2f}, too few groups', 100 * (work_ms / off_work - 1))
    ELSE fmt('{:+.2f} +- {:.2f}', 100 * (work_ratio - 1), 50 * (work_ratio_ci_high - work_ratio_ci_low)) END AS work
FROM kept JOIN (SELECT run AS off_run, step_ms AS off_step, work_ms AS off_work FROM kept WHERE cell = 'off x off') ON off_run = run
  JOIN (SELECT run AS aa_run, fmt('{:.3f} [{:.3f}, {:.3f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS aa
    FROM kept WHERE cell LIKE '%(A/A)') ON aa_run = run
WHERE cell = 'stage x adaptive';

-- values
SELECT count(*) / 2 AS rows, sum(verdict = 'FASTER' AND old) AS faster_old, sum(verdict = 'FASTER' AND NOT old) AS faster_new,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN NOT old THEN 100 * (1 - work_ratio) END), max(CASE WHEN NOT old THEN 100 * (1 - work_ratio) END)) AS new,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN old THEN 100 * (1 - work_ratio) END), max(CASE WHEN old THEN 100 * (1 - work_ratio) END)) AS old
FROM staged WHERE twice;

-- values
SELECT fmt('{:.0f}', min(ready_gate)) AS ready,
  fmt('{:.1f}', max(CASE WHEN compilation = 'default' AND pair = 'llama-3b-shape' AND requests = 8 THEN 100 * (1 - work_ratio) END)) AS compiled,
  max(CASE WHEN compilation = 'default' AND pair = 'llama-3b-shape' AND requests = 8 THEN step END) AS compiled_step,
  max(CASE WHEN compilation = 'default' AND pair = 'llama-3b-shape' AND requests = 64 THEN fmt('{:.1f}', 100 * (1 - work_ratio)) END) AS compiled64,
  max(CASE WHEN compilation = 'default' AND pair = 'llama-3b-shape' AND requests = 64 THEN step END) AS compiled64_step,
  fmt('{:.1f}', max(CASE WHEN pair = 'qwen3.5-quarter-shape' THEN 100 * (1 - work_ratio) END)) AS hybrid,
  fmt('{:.1f} +- {:.1f}', max(CASE WHEN pair = 'smollm2' THEN 100 * (1 - work_ratio) END),
    max(CASE WHEN pair = 'smollm2' THEN 50 * (work_ratio_ci_high - work_ratio_ci_low) END)) AS real
FROM staged;

-- table versions
SELECT model, requests, vllm, compilation, attention, fmt('{:.0f}', groups) AS groups, verdict, step AS "step over off x off",
  work AS "work, %", aa AS "step of off (A/A)", fmt('{:.2f}', off_step) AS "step of off, ms",
  fmt('{:.2f}', off_work) AS "work of off, ms"
FROM staged ORDER BY model, staged.requests, compilation DESC, vllm;

-- values
SELECT fmt('{:,.0f}', max(total)) AS memory_before, fmt('{:,.0f}', min(total)) AS memory_after
FROM (SELECT (stage_memory_bytes + control_memory_bytes + sham_memory_bytes) / 1e6 AS total FROM graphs);

-- table engine_died
SELECT "commit", streams, shapes AS sizes, fmt('{:,.0f}', stage_memory_bytes / 1e6) AS "stage, MB",
  fmt('{:,.0f}', control_memory_bytes / 1e6) AS "control, MB", fmt('{:,.0f}', sham_memory_bytes / 1e6) AS "A/A, MB",
  fmt('{:.1f}', sham_capture_s) AS "captures of A/A, s", gates_passed AS "gates passed", died FROM graphs;

-- values
SELECT sum(passed) AS tests_passed, sum(failed) AS tests_failed FROM tests;

-- table tests
SELECT tests, passed, failed FROM tests;
