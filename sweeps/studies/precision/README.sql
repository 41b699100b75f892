-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view found
SELECT *, CASE WHEN series = 'CPU' THEN 'CPU' WHEN series LIKE 'H200, GPU%' THEN 'device' ELSE 'host' END AS bound,
  replace(replace(series, 'GPU sets the pace', 'device-bound'), 'busy host sets the pace', 'host-bound') AS name,
  verdict = 'SLOWER' AS slower, 50 * (ratio_high - ratio_low) AS half
FROM injection;

-- values
SELECT sum(bound = 'CPU' AND slower) AS cpu_found, sum(bound = 'CPU') AS cpu_runs, sum(bound = 'CPU' AND holds) AS cpu_held,
  sum(bound = 'device' AND slower) AS gpu_found, sum(bound = 'device') AS gpu_runs, sum(bound = 'device' AND holds) AS gpu_held,
  sum(bound = 'host' AND slower) AS hidden, sum(bound = 'host') AS host_runs
FROM found;

-- table bench_find_known
SELECT name AS series, pair, fmt('{:g} %', 100 * delay) AS delay, count(*) AS runs, sum(slower) AS SLOWER,
  sum(holds) AS "truth inside", fmt('{:,.0f} to {:,.0f}', min(n), max(n)) AS blocks,
  fmt('{:.2f} to {:.2f} %', min(half), max(half)) AS "half-width",
  fmt('{:.2f} to {:.2f} %', 100 * min(aa_half_width), 100 * max(aa_half_width)) AS "A/A half-width"
FROM found GROUP BY series, delay;
