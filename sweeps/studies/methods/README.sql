-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view taxes
SELECT requests, fmt('{:.2f} [{:.2f}, {:.2f}]', time_ratio, 1 / high, 1 / low) AS tax FROM arms WHERE drafts = 0 AND method = 'eagle';

-- values
SELECT max(CASE requests WHEN 1 THEN tax END) AS tax1, max(CASE requests WHEN 8 THEN tax END) AS tax8, max(CASE requests WHEN 64 THEN tax END) AS tax FROM taxes;

-- values
SELECT fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high) AS best8 FROM arms WHERE requests = 8 AND method = 'eagle' AND drafts = 3;

-- values
SELECT fmt('{:.2f}', max(CASE WHEN drafts = 1 THEN ratio END)) AS poor_one8, fmt('{:.2f}', max(CASE WHEN drafts = 2 THEN ratio END)) AS poor_two8,
  fmt('{:.2f}', max(CASE WHEN drafts = 4 THEN ratio END)) AS poor_four8
FROM arms WHERE requests = 8 AND method = 'poor';

-- values
SELECT fmt('{:.2f}', max(CASE WHEN drafts = 3 AND method = 'eagle' THEN ratio END)) AS best,
  fmt('{:.2f}', max(CASE WHEN drafts = 4 AND method = 'eagle' THEN ratio END)) AS four,
  fmt('{:.2f}', max(CASE WHEN drafts = 3 AND method = 'eagle' THEN time_ratio END)) AS time3,
  fmt('{:.2f}', max(CASE WHEN drafts = 4 AND method = 'eagle' THEN time_ratio END)) AS time4,
  fmt('{:.2f}', max(CASE WHEN drafts = 1 AND method = 'poor' THEN ratio END)) AS poor_best,
  fmt('{:.2f}', max(CASE WHEN drafts = 4 AND method = 'poor' THEN ratio END)) AS poor_four
FROM arms WHERE requests = 64;

-- pivot arms
SELECT method AS arm, fmt('{:.0f}', drafts) AS k, fmt('{:.2f}', tokens) AS "tokens a window",
  fmt('{:.0f} request', requests) || CASE requests WHEN 1 THEN '' ELSE 's' END || fmt(', {:.0f} blocks', groups),
  fmt('{:.2f} [{:.2f}, {:.2f}], {:.2f}', ratio, low, high, time_ratio)
FROM arms ORDER BY method, drafts, requests;

-- values
SELECT fmt('{:.2f}', max(CASE scenario WHEN 'ctx-256' THEN ratio END)) AS c256, fmt('{:.2f}', max(CASE scenario WHEN 'ctx-1k' THEN ratio END)) AS c1k,
  fmt('{:.2f}', max(CASE scenario WHEN 'ctx-8k' THEN ratio END)) AS c8k
FROM contexts WHERE requests = 16 AND drafts = 4;

-- values
SELECT fmt('{:.2f}', max(CASE scenario WHEN 'ctx-256' THEN ratio END)) AS e256, fmt('{:.2f}', max(CASE scenario WHEN 'ctx-8k' THEN ratio END)) AS e8k
FROM contexts WHERE requests = 8 AND drafts = 4;

-- pivot contexts
SELECT scenario AS context, fmt('{:.0f}', drafts) AS k, CASE contexts.requests WHEN 1 THEN '1 request' ELSE fmt('{:.0f} requests', contexts.requests) END, fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high)
FROM contexts WHERE ratio IS NOT NULL ORDER BY instr('ctx-256 ctx-1k ctx-8k', scenario), contexts.drafts, contexts.requests;

-- view timed
SELECT *, instr('flash_attention_3 triton nwor_merge nwor_staged flashinfer', implementation) AS place FROM attention WHERE status = 'OK';

-- values
SELECT fmt('{:.2f} to {:.2f}', min(CASE implementation WHEN 'flash_attention_3' THEN time_over_one_row END), max(CASE implementation WHEN 'flash_attention_3' THEN time_over_one_row END)) AS fa3,
  fmt('{:.2f} to {:.2f}', min(CASE implementation WHEN 'flashinfer' THEN time_over_one_row END), max(CASE implementation WHEN 'flashinfer' THEN time_over_one_row END)) AS flashinfer,
  fmt('{:.2f} to {:.2f}', min(CASE implementation WHEN 'triton' THEN time_over_one_row END), max(CASE implementation WHEN 'triton' THEN time_over_one_row END)) AS triton,
  fmt('{:.2f} to {:.2f}', min(CASE implementation WHEN 'nwor_staged' THEN time_over_one_row END), max(CASE implementation WHEN 'nwor_staged' THEN time_over_one_row END)) AS staged,
  fmt('{:.2f}', max(CASE WHEN implementation = 'flashinfer' AND requests = 1 AND context = 32768 THEN time_over_one_row END)) AS worst,
  fmt('{:.2f}', max(CASE WHEN implementation = 'triton' AND requests = 1 AND context = 8192 THEN time_over_one_row END)) AS triton8k
FROM timed;

-- pivot attention
SELECT replace(implementation, '_', ' ') AS attention, fmt('{:.0f}', requests) AS requests, fmt('{:,.0f}', context) AS context,
  fmt('{:,.1f} us, {:.2f}', one_row_us, time_over_one_row)
FROM timed ORDER BY place, timed.requests, timed.context;
