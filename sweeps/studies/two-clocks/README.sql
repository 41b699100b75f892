-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view named
SELECT *, replace(pair, '-shape', '') AS model, replace(cache, 'auto', 'bf16') AS kv,
  coalesce(CAST(context AS INTEGER), 'text') AS tokens,
  replace(gpu, 'NVIDIA H100 80GB HBM3', 'H100, slow host') AS host,
  CASE WHEN ratio_to_off IS NULL THEN 'as stock, by choice'
    ELSE fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) END AS step,
  fmt('{:+.2f} +- {:.2f}', 100 * (work_ratio - 1), 50 * (work_ratio_ci_high - work_ratio_ci_low)) AS work
FROM cells;

-- view off
SELECT pair AS off_pair, gpu AS off_gpu, requests AS off_requests, tokens AS off_tokens, cache AS off_cache,
  step_ms AS off_step, work_ms AS off_work
FROM named WHERE cell = 'off x off';

-- view fast
SELECT * FROM named WHERE gpu LIKE '%H200%';

-- values
SELECT count(*) AS rows, sum(verdict = 'FASTER') AS faster, sum(verdict = 'SLOWER') AS slower,
  sum(verdict = 'INEFFECTIVE') AS direct,
  fmt('{:.3f} to {:.3f}', min(CASE verdict WHEN 'FASTER' THEN ratio_to_off END),
    max(CASE verdict WHEN 'FASTER' THEN ratio_to_off END)) AS ratios
FROM fast WHERE cell LIKE 'stage%';

-- values
SELECT fmt('{:.2f}', median(50 * (work_ratio_ci_high - work_ratio_ci_low))) AS noise,
  fmt('{:.2f}', max(50 * (work_ratio_ci_high - work_ratio_ci_low))) AS worst
FROM fast WHERE cell LIKE '%(A/A)' AND verdict = 'SAME';

-- values
SELECT step AS hidden, work AS shown FROM named
WHERE gpu LIKE '%H100%' AND cell LIKE 'stage%' AND pair = 'llama-3b-shape' AND requests = 8 AND tokens = 1024
  AND kv = 'bf16';

-- table staging_save_by
SELECT model, requests, tokens AS context, kv AS cache, attention, fmt('{:.0f}', groups) AS groups, verdict,
  step AS "step over off x off", work AS "work, %",
  fmt('{:.2f}', off_step) AS "step of off, ms", fmt('{:.2f}', off_work) AS "work of off, ms"
FROM fast JOIN off
  ON pair = off_pair AND gpu = off_gpu AND requests = off_requests AND tokens = off_tokens AND cache = off_cache
WHERE cell LIKE 'stage%' ORDER BY model, tokens, kv, requests;

-- table part_attention_noise
SELECT model, requests, tokens AS context, kv AS cache, cell, fmt('{:.0f}', groups) AS groups,
  step AS "step over off x off", work AS "work, %"
FROM fast WHERE (cell LIKE 'control%' OR cell LIKE '%(A/A)') AND ratio_to_off IS NOT NULL
ORDER BY model, tokens, kv, requests, cell DESC;

-- table gated_path_that
SELECT replace(pair, '-shape', '') AS model, requests, CAST(context AS INTEGER) AS context, replace(cache, 'auto', 'bf16') AS cache,
  fmt('{:.0f} / {:.0f}', ready_gate, ready_timed) AS "ready windows, gate / timed", fmt('{:.0f}', kv_layers) AS "layers, K/V", fmt('{:.0f}', local_layers) AS "layers, own inputs",
  verdict, CASE WHEN ratio_to_off IS NULL THEN 'too few groups' ELSE fmt('{:.3f} [{:.3f}, {:.3f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) END AS "step over off x off",
  CASE WHEN work_ratio IS NULL THEN '' ELSE fmt('{:+.1f} +- {:.1f}', 100 * (work_ratio - 1), 50 * (work_ratio_ci_high - work_ratio_ci_low)) END AS "work, %"
FROM gated WHERE cell LIKE 'stage%' ORDER BY model, context, cache, requests;
