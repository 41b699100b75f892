-- Fills the page of the same name: see sweeps/studies/tables.py.

-- values
SELECT fmt('{:.2f}', max(CASE figure WHEN 'acceptance length' THEN off END)) AS off,
  fmt('{:.2f}', max(CASE figure WHEN 'acceptance length' THEN stage END)) AS stage,
  sum(low <= 0 AND high >= 0) AS held, count(*) AS figures
FROM differences;

-- values
SELECT count(*) AS blocks, sum(requests) AS requests, sum(same_text_as_off) AS equal FROM acceptance WHERE cell = 'stage x graph';

-- table acceptance_same_off
SELECT figure, fmt('{:.3f}', off) AS "off x off", fmt('{:.3f}', stage) AS stage,
  fmt('{:+.3f} [{:+.3f}, {:+.3f}]', stage - off, low, high) AS "stage - off [95 % interval]",
  CASE WHEN low <= 0 AND high >= 0 THEN 'yes' ELSE 'NO' END AS "includes 0"
FROM differences;
