-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view fair
SELECT *, "ncu / sampled" AS ratio FROM ncu WHERE "window" >= 2;

-- values
SELECT fmt('{:.2f}', 100 * max(CASE counter WHEN 'DRAM read' THEN abs(ratio - 1) END)) AS read,
  fmt('{:.2f}', 100 * max(CASE counter WHEN 'DRAM written' THEN abs(ratio - 1) END)) AS written
FROM fair;

-- table nsight_compute_against
SELECT counter, fmt('{:,.2f}', avg("ncu MB")) AS "ncu MB", fmt('{:,.2f}', avg("sampled MB, mean")) AS "sampled MB, mean",
  count(*) AS windows, fmt('{:.4f}', avg(ratio)) AS mean, fmt('{:.4f}', min(ratio)) AS lowest, fmt('{:.4f}', max(ratio)) AS highest
FROM fair GROUP BY counter;
