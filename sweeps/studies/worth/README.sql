-- Fills the page of the same name: see sweeps/studies/tables.py.

-- values
SELECT fmt('{:.2f}', max(CASE WHEN requests = 1 AND drafts = 2 THEN ratio END)) AS one,
  fmt('{:.2f}', max(CASE WHEN requests = 8 AND drafts = 1 THEN ratio END)) AS eight FROM worth;

-- values
SELECT sum(agrees) AS served_agreed, sum(worth > served) AS served_above, count(*) AS served_settings FROM bench_serve WHERE server = 'as worth';

-- values
SELECT sum((ratio / over_plain - 1) * (ratio / over_plain - 1) <= ((high - low) * (high - low) / ratio / ratio
  + (plain_high - plain_low) * (plain_high - plain_low) / over_plain / over_plain) / 4) AS engines_agreed
  FROM agreement_cpu JOIN worth_engines USING (requests, drafts);

-- values
SELECT sum(agrees) AS agreed_cpu, count(*) AS settings_cpu, sum(apart > 0) AS above_cpu,
  fmt('{:.1f} to {:.1f}', min(100 * apart), max(100 * apart)) AS range_cpu FROM agreement_cpu;

-- values
SELECT sum(agrees) AS agreed, count(*) AS settings, fmt('{:.2f} to {:.2f}', min(over_plain), max(over_plain)) AS plain,
  sum(CASE WHEN pair LIKE '%3b%' THEN agrees END) AS agreed_small, sum(pair LIKE '%3b%') AS settings_small,
  sum(CASE WHEN pair LIKE 'qwen%' THEN agrees END) AS agreed_next, sum(pair LIKE 'qwen%') AS settings_next,
  sum(CASE WHEN pair LIKE '%8b%' THEN agrees END) AS agreed_8b, sum(pair LIKE '%8b%') AS settings_8b,
  sum(CASE WHEN pair LIKE '%8b%' THEN apart > 0 END) AS above_8b,
  fmt('{:.2f} +- {:.2f}', pooled(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END, 100 * allowed),
    pooled_half(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END, 100 * allowed)) AS offset_8b,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END), max(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END)) AS range_8b FROM agreement;

-- values
SELECT max(CASE WHEN pair LIKE '%3b%' THEN process_s END) AS at_once_s, max(CASE WHEN pair LIKE '%8b%' THEN process_s END) AS at_once_8b_s,
  max(CASE WHEN pair LIKE 'qwen%' THEN process_s END) AS at_once_next_s FROM restarts;

-- values
SELECT fmt('{:.2f} to {:.2f}', min(CASE gpu WHEN 'H200' THEN ratio END), max(CASE gpu WHEN 'H200' THEN ratio END)) AS without,
  fmt('{:.2f} to {:.2f}', min(CASE gpu WHEN 'H100' THEN ratio END), max(CASE gpu WHEN 'H100' THEN ratio END)) AS "with" FROM worth_gpu WHERE requests = 128 AND drafts = 4;

-- values
SELECT fmt('{:.2f}', max(CASE WHEN requests = 256 AND drafts = 1 THEN ratio END)) AS one_256, fmt('{:.2f}', max(CASE WHEN requests = 64 AND drafts = 3 THEN ratio END)) AS three_64,
  fmt('{:.2f}', max(CASE WHEN requests = 32 AND drafts = 4 THEN ratio END)) AS four_32 FROM worth_gpu WHERE pair LIKE '%8b%' AND gpu = 'H100';

-- values
SELECT fmt('{:.4f}', min(CASE drafts WHEN 2 THEN ratio END)) AS planted_low, fmt('{:.4f}', max(CASE drafts WHEN 2 THEN ratio END)) AS planted_high,
  fmt('{:.1f}', max(CASE WHEN drafts <> 2 THEN 100 * abs(ratio - 1) END)) AS planted_other FROM planted;

-- values
SELECT fmt('{:.3f} to {:.3f}', min(ratio), max(ratio)) AS schedule, fmt('{:.0f}', max(50 * (high - low))) AS known FROM schedule_cost WHERE requests < 128;

-- values
SELECT fmt('{:.2f} to {:.2f}', min(CASE requests WHEN 32 THEN stage_ratio END), max(CASE requests WHEN 32 THEN stage_ratio END)) AS stage_many,
  fmt('{:.2f} to {:.2f}', min(CASE requests WHEN 256 THEN stage_ratio END), max(CASE requests WHEN 256 THEN stage_ratio END)) AS stage_most FROM worth_stage_h200;

-- values
SELECT fmt('{:.1f} to {:.1f}', min(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END), max(CASE WHEN pair LIKE '%8b%' THEN 100 * apart END)) AS inner_8b,
  fmt('{:.1f} to {:.1f}', min(CASE WHEN pair LIKE '%3b%' THEN 100 * apart END), max(CASE WHEN pair LIKE '%3b%' THEN 100 * apart END)) AS inner_3b,
  sum(agrees) AS inner_agreed, count(*) AS inner_settings FROM agreement_inner;

-- view watched
SELECT own.requests, own.block, 1e3 * stock.seconds / stock.windows AS stock_ms,
  own.seconds / own.windows / (stock.seconds / stock.windows) AS ratio
FROM watching AS own JOIN watching AS stock USING (requests, block)
WHERE own.arm = 'watched' AND stock.arm = 'stock' AND own.block >= 0;

-- table many_drafts_pay
SELECT requests, drafts AS k, CASE WHEN ratio IS NULL THEN 'too few groups' ELSE
  fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high) END AS "tokens/s over k = 0", verdict,
  fmt('{:.2f}', tokens) AS "tokens a window", fmt('{:.2f}', time_ratio) AS "time of a window", fmt('{:.0f}', groups) AS groups
FROM worth WHERE drafts > 0;

-- table many_drafts_pay_2
SELECT own.requests, own.drafts AS k, fmt('{:.2f} [{:.2f}, {:.2f}]', worth, worth_low, worth_high) AS "worth, over k = 0",
  fmt('{:.2f} [{:.2f}, {:.2f}]', restarts, restarts_low, restarts_high) AS "separate engines, over k = 0",
  CASE agrees WHEN 1 THEN 'yes' ELSE 'no' END AS "within intervals",
  fmt('{:.2f} [{:.2f}, {:.2f}]', engines.ratio, engines.low, engines.high) AS "--engines, over plain decoding",
  fmt('{:.2f} [{:.2f}, {:.2f}]', over_plain, plain_low, plain_high) AS "separate engines, over plain decoding"
FROM agreement_cpu AS own JOIN worth_engines AS engines USING (requests, drafts);

-- table many_drafts_pay_3
SELECT requests, drafts AS k, fmt('{:.2f} [{:.2f}, {:.2f}]', max(worth), max(worth_low), max(worth_high)) AS "worth, over k = 0",
  max(CASE server WHEN 'as worth' THEN fmt('{:.2f} [{:.2f}, {:.2f}]', served, served_low, served_high) END) AS "servers, as worth",
  max(CASE server WHEN 'one core' THEN fmt('{:.2f} [{:.2f}, {:.2f}]', served, served_low, served_high) END) AS "one core for the model",
  max(CASE server WHEN 'vLLM''s defaults' THEN fmt('{:.2f} [{:.2f}, {:.2f}]', served, served_low, served_high) END) AS "vLLM's defaults"
FROM bench_serve GROUP BY requests, drafts;

-- pivot shapes_real_text
SELECT replace(replace(pair, '-shape', ''), '-mtp', '') AS model, gpu AS "GPU", requests, 'k = ' || drafts AS arm, fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high)
FROM worth_gpu WHERE drafts > 0 ORDER BY pair, gpu DESC, requests, drafts;

-- table beside_separate_engines
SELECT replace(pair, '-shape', '') AS shape, gpu AS "GPU", requests, drafts AS k, fmt('{:.3f} [{:.3f}, {:.3f}]', worth, worth_low, worth_high) AS "worth",
  fmt('{:.3f} [{:.3f}, {:.3f}]', restarts, restarts_low, restarts_high) AS "engines, over 0",
  CASE agrees WHEN 1 THEN 'yes' ELSE 'no' END AS "within intervals",
  fmt('{:.2f} [{:.2f}, {:.2f}]', over_plain, plain_low, plain_high) AS "engines, over plain"
FROM agreement;

-- pivot beside_separate_engines_2
SELECT replace(pair, '-shape', '') AS shape, requests, CASE arm WHEN 'plain' THEN 'no drafter' WHEN '0' THEN 'k = 0' ELSE 'k = ' || arm END AS engine,
  fmt('{:.2f}', median(1e3 * seconds / windows)) FROM restarts WHERE arm NOT LIKE '%/%' GROUP BY pair, requests, arm ORDER BY pair, requests, instr('plain01234', arm);

-- table without_first_window
SELECT replace(pair, '-shape', '') AS shape, drafts AS k, fmt('{:.3f} [{:.3f}, {:.3f}]', worth, worth_low, worth_high) AS "worth",
  fmt('{:.3f} [{:.3f}, {:.3f}]', restarts, restarts_low, restarts_high) AS "engines, over 0", fmt('{:+.2f} +- {:.2f}', 100 * apart, 100 * allowed) AS "worth over engines, %",
  CASE agrees WHEN 1 THEN 'yes' ELSE 'no' END AS "within intervals"
FROM agreement_inner;

-- pivot planted_slowdown
SELECT run AS repetition, 'k = ' || drafts AS k, fmt('{:.4f} [{:.4f}, {:.4f}]', ratio, low, high) FROM planted ORDER BY run DESC, drafts;

-- table adaptive_verification
SELECT requests, k, fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high) AS "tokens/s over plain decoding", verdict,
  fmt('{:.2f}', tokens) AS "tokens a window", fmt('{:.2f}', time_ratio) AS "time of a window", blocks FROM adaptive;

-- table staged_draft_counts
SELECT requests, drafts AS k, fmt('{:.2f} [{:.2f}, {:.2f}]', ratio, low, high) AS "tokens/s over k = 0", fmt('{:.2f}', time_ratio) AS "time of a window",
  fmt('{:.3f} [{:.3f}, {:.3f}]', stage_ratio, stage_low, stage_high) AS "staged over not", stage_verdict AS verdict, fmt('{:.0f}', stage_groups) AS groups
FROM worth_stage_h200 WHERE drafts > 0 AND ratio IS NOT NULL;

-- table watching_costs_server
SELECT requests, count(*) AS blocks, fmt('{:.2f}', median(stock_ms)) AS "stock, ms",
  fmt('{:.3f} [{:.3f}, {:.3f}]', median(ratio), median_low(ratio), median_high(ratio)) AS "watched over stock"
FROM watched GROUP BY requests;

-- pivot arms_serve
SELECT a.requests, a.arm || ', k = 2' AS server, fmt('{:.2f} [{:.2f}, {:.2f}]', median(p.tpot_ms / a.tpot_ms), median_low(p.tpot_ms / a.tpot_ms), median_high(p.tpot_ms / a.tpot_ms))
FROM arms_serve a JOIN arms_serve p USING (round, requests) WHERE p.arm = 'plain' AND a.arm <> 'plain' GROUP BY 1, 2 ORDER BY 1, 2;

-- values
SELECT fmt('{:.2f}', median(a.ttft_ms / p.ttft_ms)) AS lookup_prefill FROM arms_serve a JOIN arms_serve p USING (round, requests) WHERE p.arm = 'plain' AND a.arm = 'ngram';
