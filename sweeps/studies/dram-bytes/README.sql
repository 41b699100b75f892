-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view diff
SELECT run, stage_by AS staged_by, requests || ' x ' || draft_tokens AS window,
  substr(run, 1, instr(run, '-') - 1) AS graphs,
  replace(run, rtrim(run, '0123456789.'), '') AS acceptance,
  run LIKE '%split-%' OR run LIKE '%-emptied-%' OR run LIKE '%-engine%' AS is_test,
  accepted_tokens_mean AS accepted, part_cut AS cut, part_kv AS kv,
  dram_write_bytes_mean AS written,
  dram_write_bytes_minus_off_mean AS found,
  dram_write_bytes_minus_off_high - dram_write_bytes_minus_off_mean AS half,
  part_splits + part_log_sum_exp + part_spills + part_cut AS kernel,
  dram_write_bytes_minus_off_mean - part_kv - part_splits - part_log_sum_exp - part_spills - part_cut
    AS unexplained,
  dram_read_bytes_minus_off_mean AS read_found,
  dram_read_bytes_minus_off_high - dram_read_bytes_minus_off_mean AS read_half,
  dram_read_bytes_minus_off_predicted AS read_model, alone_read_bytes AS read_kernel,
  dram_read_bytes_minus_off_mean - dram_read_bytes_minus_off_predicted - alone_read_bytes AS read_unexplained
FROM dram WHERE nwor_mode = 'stage';

-- view slope
SELECT graphs, staged_by, window,
  (count(*) * sum(accepted * (found - cut)) - sum(accepted) * sum(found - cut))
    / (count(*) * sum(accepted * accepted) - sum(accepted) * sum(accepted)) / 1e3 AS kb,
  sqrt(sum(CASE WHEN acceptance <> '0.5' THEN half * half END)) / (max(accepted) - min(accepted)) / 1e3 AS kb_half,
  (count(*) * sum(accepted * kv) - sum(accepted) * sum(kv))
    / (count(*) * sum(accepted * accepted) - sum(accepted) * sum(accepted)) / 1e3 AS model_kb
FROM diff WHERE NOT is_test GROUP BY graphs, staged_by, window;

-- values
SELECT fmt('{:.1f} +- {:.1f}', kb, kb_half) AS saved, fmt('{:.1f}', model_kb) AS predicted
FROM slope WHERE graphs = 'full' AND staged_by = 'reference' AND window = '8 x 4';

-- values
SELECT fmt('{:+.2f} to {:+.2f}', min(unexplained) / 1e6, max(unexplained) / 1e6) AS full_left
FROM diff WHERE graphs = 'full' AND NOT is_test;

-- values
SELECT fmt('{:.1f}', max(unexplained) / 1e6) AS eager_left
FROM diff WHERE graphs = 'eager' AND staged_by = 'reference' AND window = '64 x 8';

-- values
SELECT fmt('{:+.2f} +- {:.2f}', found / 1e6, half / 1e6) AS one_split,
  fmt('{:+.2f}', (kv + kernel) / 1e6) AS one_split_model
FROM diff WHERE run = 'full-1split-8x4-0.5';

-- values
SELECT fmt('{:.2f}', max(-part_splits) / 1e6) AS splits, fmt('{:.2f}', max(part_spills) / 1e6) AS spills FROM dram;

-- values
SELECT fmt('{:.2f} to {:.2f}', min(dram_write_bytes_minus_off_mean) / 1e6,
  max(dram_write_bytes_minus_off_mean) / 1e6) AS held
FROM dram WHERE run LIKE 'eager-hold-64x8-%' AND arm = 'A/A';

-- values
SELECT fmt('{:.0f} to {:.0f}', min(dram_write_bytes_mean) / 1e6, max(dram_write_bytes_mean) / 1e6) AS stock_eager
FROM dram WHERE nwor_mode = 'off' AND arm IS NULL AND requests = 64 AND run LIKE 'eager-%';

-- table writes
SELECT d.staged_by AS "staged by", d.window, d.acceptance,
  fmt('{:,.0f}', off.dram_write_bytes_mean / 1e6) AS "stock writes",
  fmt('{:+.2f}', aa.dram_write_bytes_minus_off_mean / 1e6) AS "A/A",
  fmt('{:+.2f} +- {:.2f}', found / 1e6, half / 1e6) AS "stage - off",
  fmt('{:+.2f}', kv / 1e6) AS "K/V, model", fmt('{:+.2f}', kernel / 1e6) AS "attention, model",
  fmt('{:+.2f}', unexplained / 1e6) AS unexplained
FROM diff d
  JOIN dram off ON off.run = d.run AND off.nwor_mode = 'off' AND off.arm IS NULL
  JOIN dram aa ON aa.run = d.run AND aa.arm = 'A/A'
WHERE NOT is_test AND d.graphs = 'full' ORDER BY d.staged_by DESC, off.requests, d.acceptance;

-- table bytes_each_accepted
SELECT graphs, staged_by AS "staged by", window, fmt('{:.1f} +- {:.1f}', kb, kb_half) AS "measured KB",
  fmt('{:.1f}', model_kb) AS "model KB"
FROM slope ORDER BY graphs DESC, staged_by DESC, window DESC;

-- table reads
SELECT staged_by AS "staged by", window, acceptance, fmt('{:+.2f}', read_found / 1e6) AS "stage - off",
  fmt('{:+.2f}', read_model / 1e6) AS "K/V, model", fmt('{:+.2f}', read_kernel / 1e6) AS "kernels by themselves",
  fmt('{:+.2f} +- {:.2f}', read_unexplained / 1e6, read_half / 1e6) AS unexplained
FROM diff WHERE NOT is_test AND graphs = 'full' ORDER BY staged_by DESC, window DESC, acceptance;
