-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view runs
SELECT *, replace(cache, 'auto', 'bf16') AS kv, 100 * (ratio_to_off - 1) AS effect,
  50 * (ratio_ci_high - ratio_ci_low) AS half, ratio_ci_low IS NOT NULL AS known,
  fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS by_window,
  fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_batches, ratio_batches_low, ratio_batches_high) AS by_batch
FROM cells;

-- view settings
SELECT host, replace(pair, '-shape', '') AS model, requests, context, fmt('{:,.0f}', context) AS tokens_of_context,
  kv AS cache, acceptance AS tokens,
  max(CASE WHEN cell = 'stage x graph' THEN fmt('{:+.2f} +- {:.2f}', effect, half) END) AS stage,
  max(CASE WHEN cell = 'control x off' THEN fmt('{:+.2f} +- {:.2f}', effect, half) END) AS attention,
  max(CASE WHEN cell = 'stage x graph over control x off' THEN fmt('{:+.2f} +- {:.2f}', effect, half) END) AS writes,
  max(CASE WHEN cell LIKE '%(A/A)' THEN fmt('+- {:.2f}', half) END) AS noise
FROM runs GROUP BY host, pair, requests, context, kv, acceptance HAVING max(known);

-- view not_writing
SELECT * FROM runs WHERE cell = 'stage x graph over control x off' AND host >= 3;

-- view arms
SELECT *, rowid AS place, replace(cache, 'auto', 'bf16') AS kv,
  CASE kind WHEN 'none' THEN 'nothing' ELSE '0.3 % on the ' || kind END AS what,
  CASE kind WHEN 'device' THEN 0.3 ELSE 0 END AS truth
FROM "groups";

-- view twentieths
SELECT kv, what, truth, effect(device / 1e4) AS found, half_width(device / 1e4) AS half
FROM (SELECT *, ntile(20) OVER (PARTITION BY kv, what ORDER BY place) AS piece FROM arms WHERE requests = 8)
GROUP BY kv, what, piece;

-- view pieces
SELECT kv, what, sum(found > half) AS slower, sum(found < -half) AS faster, sum(abs(found - truth) <= half) AS inside
FROM twentieths GROUP BY kv, what;

-- view idle
SELECT half_width(device / 1e4) AS half FROM arms WHERE kind = 'none' GROUP BY kv, requests;

-- view called
SELECT *, CASE kind WHEN 'none' THEN 'nothing' ELSE '0.3 % on the ' || kind END AS what,
  effect > half_width AS slower, effect < -half_width AS faster,
  abs(effect - CASE kind WHEN 'device' THEN 0.003 ELSE 0 END) <= half_width AS inside
FROM planted;

-- values
SELECT fmt('{:.3f}', min(half)) AS best, fmt('{:.2f}', max(half)) AS worst FROM idle;

-- values
SELECT fmt('{:+.3f} +- {:.3f}', effect(device / 1e4), half_width(device / 1e4)) AS found FROM arms WHERE kind = 'device';

-- values
SELECT slower AS pieces FROM pieces WHERE what LIKE '%device';

-- values
SELECT sum(slower AND host = 2) AS clear, sum(slower AND host = 1) AS hidden, sum(host = 1) AS each FROM called WHERE kind = 'device';

-- values
SELECT count(*) AS idle_runs, sum(slower OR faster) AS idle_called FROM called WHERE kind = 'none';

-- values
SELECT fmt('{:.2f}', 100 * max(half_width)) AS clear_half FROM called WHERE host = 2;

-- values
SELECT fmt('{:.0f}', avg((ratio_batches_high - ratio_batches_low) * 50 / half)) AS wider
FROM runs WHERE host = 1 AND requests = 8 AND cell = 'stage x graph';

-- values
SELECT sum(ratio_ci_high < 1) AS pay, sum(ratio_ci_low > 1) AS cost, count(*) AS splits,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN ratio_ci_high < 1 THEN -effect END), max(-effect)) AS gains,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN ratio_ci_low > 1 THEN effect END), max(effect)) AS costs
FROM not_writing WHERE known;

-- values
SELECT fmt('{:,.0f} and {:,.0f}', min(clock_low_mhz), max(clock_high_mhz)) AS clocks FROM runs WHERE host = 3 AND requests = 64;

-- values
SELECT sum(ratio_batches_low <= ratio_to_off AND ratio_to_off <= ratio_batches_high) AS held, count(*) AS intervals
FROM runs WHERE ratio_batches_low IS NOT NULL AND "groups" IS NOT NULL;

-- values
SELECT fmt('{:.0f}', 100 * (ratio_batches - 1)) AS drift FROM runs WHERE host = 7 AND cell LIKE '%(A/A)';

-- table off_x_off
SELECT kv AS cache, requests, fmt('{:.0f}', max(seconds)) AS seconds, count(*) AS "groups",
  fmt('{:.2f}', avg(window_ms)) AS "window ms",
  CASE WHEN min(sm_clock_mhz) = max(sm_clock_mhz) THEN min(sm_clock_mhz)
    ELSE min(sm_clock_mhz) || ' to ' || max(sm_clock_mhz) END AS "SM clock MHz",
  fmt('{:+.3f} +- {:.3f}', effect(device / 1e4), half_width(device / 1e4)) AS "device clock",
  fmt('{:+.3f} +- {:.3f}', effect(host / 1e4), half_width(host / 1e4)) AS "host clock",
  fmt('{:.2f}', rank_correlation(device, host)) AS correlation
FROM arms WHERE kind = 'none' GROUP BY kv, requests;

-- table longer_run_windows
SELECT kv AS cache, run_length AS "windows a run", count(*) AS "groups",
  fmt('{:+.3f} +- {:.3f}', effect(device / 1e4), half_width(device / 1e4)) AS effect
FROM arms WHERE kind = 'none' AND requests = 8 GROUP BY kv, run_length;

-- table planted_slow_downs
SELECT kv AS cache, what AS planted,
  fmt('{:+.3f} +- {:.3f}', effect(device / 1e4), half_width(device / 1e4)) AS "all groups",
  slower || ' of 20' AS "reported slower", faster || ' of 20' AS "reported faster", inside || ' of 20' AS inside
FROM arms JOIN pieces USING (kv, what) WHERE requests = 8 GROUP BY kv, what;

-- table planted_slow_downs_2
SELECT fmt('{:,}', context) AS context, what AS planted, count(*) AS runs,
  fmt('{:.0f} to {:.0f}', min(seconds), max(seconds)) AS seconds,
  fmt('{:.2f} to {:.2f}', min(window_ms), max(window_ms)) AS "window ms",
  fmt('{:.2f} to {:.2f}', 100 * min(half_width), 100 * max(half_width)) AS "half-width",
  fmt('{:.2f} to {:.2f}', min(together), max(together)) AS correlation,
  sum(slower) AS "reported slower", sum(faster) AS "reported faster", sum(inside) AS inside
FROM called GROUP BY context, kind;

-- table windows_against_whole
SELECT kv AS cache, cell, fmt('{:.0f}', "groups") AS "groups", by_window AS windows, by_batch AS "whole batches"
FROM runs WHERE host = 1 AND requests = 8 AND known AND "groups" IS NOT NULL;

-- table by_model_batch
SELECT model, requests, cache, tokens, stage, attention, writes, noise FROM settings WHERE host = 3;

-- table 256_requests_8
SELECT model, requests, tokens_of_context AS context, cache, tokens, stage, attention, writes, noise FROM settings WHERE host = 4;

-- table attention_tuned_since
SELECT model, requests, cache, tokens, stage, attention, writes, noise FROM settings WHERE host = 5;

-- table latent_attention_64
SELECT model, requests, tokens_of_context AS context, cache, tokens, stage, attention, writes, noise FROM settings WHERE host = 8;

-- table by_size_model
SELECT model, requests, stage, attention, writes, noise FROM settings
WHERE cache = 'bf16' AND tokens = 2.6 AND context = 1024 AND host = 6 AND model IN ('llama-8b', 'gpt-oss-20b')
ORDER BY model LIKE 'gpt%', model, requests;

-- table real_text
SELECT cell, fmt('{:.0f}', "groups") AS "groups", by_window AS windows, by_batch AS "whole batches"
FROM runs WHERE host = 7 AND "groups" IS NOT NULL;

-- values
SELECT attention AS real_attention, writes AS real_writes FROM settings WHERE host = 7;

-- table again_busy_host
SELECT requests, kv AS cache, cell, fmt('{:.0f}', "groups") AS "groups", by_window AS windows, by_batch AS "whole batches"
FROM runs WHERE host = 2 AND pair = 'llama-3b-shape' AND known AND "groups" IS NOT NULL;
