-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view ours
SELECT c.*, 100 * c.covered AS share, 100 * c.error AS sigma, 100 * b.covered AS once, 100 * b.false_verdicts AS once_false,
  c.covered + 2 * c.error < 0.95 AS short
FROM coverage c LEFT JOIN before b USING (interval, condition) WHERE c.ours;

-- values
SELECT count(*) AS lines, sum(NOT short) AS good, sum(short) AS bad FROM ours;

-- values
SELECT fmt('{:.0f}', 100 * max(false_verdicts)) AS false FROM ours
WHERE interval LIKE 'sweep: interleaved%' OR interval LIKE 'sweep: ratio of whole%';

-- values
SELECT fmt('{:.0f}', 100 * covered) AS verdict FROM coverage WHERE condition = 'stopped on a verdict';

-- table often_printed_intervals
SELECT interval, condition, fmt('{:.0f}', share) AS covered FROM ours WHERE short ORDER BY share;

-- table every_line
SELECT interval, condition, fmt('{:.0f}', 100 * claimed) AS claimed, fmt('{:.1f} ± {:.1f}', share, sigma) AS covered,
  fmt('{:.1f}', 100 * false_verdicts) AS false,
  CASE WHEN abs(share - once) > 3 * max(sigma, 0.7) THEN fmt('{:.1f}, {:.1f}', once, once_false) END AS before,
  fmt('{:.2f}', 100 * half_width) AS "half-width, %"
FROM ours;
