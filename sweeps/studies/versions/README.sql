-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view staged
SELECT *, replace(pair, '-shape', '') AS model,
  fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS step,
  fmt('{:+.2f} +- {:.2f}', 100 * (work_ratio - 1), 50 * (work_ratio_ci_high - work_ratio_ci_low)) AS work
FROM cells WHERE cell = 'stage x adaptive';

-- view off
SELECT pair AS off_pair, requests AS off_requests, vllm AS off_vllm, step_ms AS off_step, work_ms AS off_work
FROM cells WHERE cell = 'off x off';

-- view noise
SELECT pair AS aa_pair, requests AS aa_requests, vllm AS aa_vllm,
  fmt('{:.3f} [{:.3f}, {:.3f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS aa
FROM cells WHERE cell LIKE '%(A/A)';

-- values
SELECT count(*) / 2 AS rows, sum(verdict = 'FASTER' AND vllm LIKE '0.32%') AS faster_old,
  sum(verdict = 'FASTER' AND vllm LIKE '0.33%') AS faster_new, min(ready_gate) AS ready,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN vllm LIKE '0.33%' THEN 100 * (1 - work_ratio) END),
    max(CASE WHEN vllm LIKE '0.33%' THEN 100 * (1 - work_ratio) END)) AS new,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN vllm LIKE '0.32%' THEN 100 * (1 - work_ratio) END),
    max(CASE WHEN vllm LIKE '0.32%' THEN 100 * (1 - work_ratio) END)) AS old
FROM staged;

-- table versions
SELECT model, requests, vllm, attention, fmt('{:.0f}', groups) AS groups, verdict, step AS "step over off x off",
  work AS "work, %", aa AS "step of off (A/A)", fmt('{:.2f}', off_step) AS "step of off, ms",
  fmt('{:.2f}', off_work) AS "work of off, ms"
FROM staged JOIN off ON off_pair = pair AND off_requests = requests AND off_vllm = vllm
  JOIN noise ON aa_pair = pair AND aa_requests = requests AND aa_vllm = vllm
ORDER BY model, requests, vllm;
