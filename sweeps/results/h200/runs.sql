-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view cells
SELECT *, rowid AS place, CASE WHEN instr(run, '/') THEN substr(run, 1, instr(run, '/') - 1) ELSE run END AS sweep,
  cache_dtype AS cache,
  CASE verdict WHEN 'reference' THEN fmt('{:.2f} ms a window', window_ms)
    ELSE verdict || ifnull(fmt(' {:.3f} [{:.3f}, {:.3f}]', ratio, ratio_low, ratio_high), ifnull(fmt(' {:.3f}', ratio), '')) END AS said
FROM runs;

-- view stock_cells
SELECT run, forward_ms AS stock_forward, ifnull(fmt('{:g}', synthetic_length), fmt('{:.2f} (gained)', tokens_a_window)) AS tokens
FROM cells WHERE verdict = 'reference';

-- values
SELECT sum(verdict = 'FASTER') AS faster, sum(verdict = 'SLOWER') AS slower, sum(verdict NOT IN ('FASTER', 'SLOWER')) AS open, count(*) AS all_runs
FROM cells WHERE cell = 'stage x graph';

-- pivot time_per_window
SELECT sweep, scenario, requests, dtype, cache, tokens, n, cell, said FROM cells JOIN stock_cells USING (run) ORDER BY place;

-- pivot device_host
SELECT sweep, scenario, requests, cache, tokens, fmt('{:.3f}', stock_forward) AS "forward ms", cell,
  CASE verdict WHEN 'reference' THEN '' ELSE ifnull(fmt('{:.2f}; ', (forward_ms + ifnull(commit_ms, 0)) / stock_forward), '') END
    || ifnull(fmt('{:.0f}', 1e3 * hooks_ms), '') || ifnull(fmt(' ({:.0f})', 1e3 * deciding_ms), '')
FROM cells JOIN stock_cells USING (run) WHERE run IN (SELECT run FROM cells WHERE hooks_ms IS NOT NULL) ORDER BY place;

-- table tokens_acceptance_real
SELECT sweep, cell, fmt('{:,}', draft_tokens_total) AS drafts, fmt('{:,}', accepted_tokens) AS accepted,
  fmt('{:.2f}', tokens_a_window) AS "tokens a window", fmt('{:,}', staged) AS staged, fmt('{:,}', committed) AS committed,
  parity AS tokens, first_mismatch AS "first mismatch"
FROM cells WHERE synthetic_length IS NULL ORDER BY place;
