-- Fills the page of the same name: see sweeps/studies/tables.py.

-- values
SELECT count(*) AS runs FROM mtp WHERE kv_verdict <> 'INVALID';

-- values
SELECT fmt('{:.0f}', max(groups)) AS groups FROM mtp WHERE pair LIKE 'qwen%';

-- values
SELECT fmt('{:.1f}', max(CASE WHEN pair LIKE 'glm%' THEN 100 * (1 - ratio_to_off) END)) AS glm,
  fmt('{:.1f}', max(CASE WHEN pair LIKE 'deep%' THEN 100 * (ratio_to_off - 1) END)) AS deepseek
FROM timed WHERE cell LIKE 'stage%';

-- table model_that_drafts
SELECT replace(pair, '-shape', '') AS model, gpu AS "GPU", layers || ' + ' || drafter_layers AS "layers + MTP",
  attention, staged_tokens AS staged, committed_tokens AS committed, fallbacks,
  positions_checked || ' of ' || positions_committed AS "K/V positions compared", kv_verdict AS "K/V",
  fmt('{:.2f}', attention_error_over_allowed) AS "attention's error over allowed"
FROM mtp;

-- table model_that_drafts_2
SELECT replace(pair, '-shape', '') AS model, cell, verdict, fmt('{:.0f}', groups) AS groups,
  fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS "step over off x off",
  fmt('{:+.2f} +- {:.2f}', work_percent, work_half_width) AS "work, %"
FROM timed;
