-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view each_run
SELECT gpu, form, cache_dtype AS states, requests, drafts, max(CASE WHEN implementation = 'nwor' THEN time_us END) AS ours,
  max(CASE WHEN implementation = 'nwor_norm' THEN time_us END) AS normed,
  max(CASE WHEN implementation = 'control' THEN time_us END) AS control,
  max(CASE WHEN implementation = 'vllm_triton' THEN time_us END) AS triton,
  max(CASE WHEN implementation = 'vllm_cuda' THEN time_us END) AS cuda
FROM kernels GROUP BY gpu, form, cache_dtype, requests, drafts;

-- view kernels_
SELECT own.*, old.ours AS ours_before, old.normed AS normed_before, old.control AS control_before
FROM each_run AS own JOIN each_run AS old USING (gpu, states, requests, drafts)
WHERE own.form = 'early, cut3' AND old.form = 'before';

-- values
SELECT fmt('{:.2f} to {:.2f}', min(ours / triton), max(ours / triton)) AS triton,
  fmt('{:.2f} to {:.2f}', min(normed / cuda), max(normed / cuda)) AS cuda,
  fmt('{:.2f} to {:.2f}', min(ours / ours_before), max(ours / ours_before)) AS bare_now,
  fmt('{:.2f} to {:.2f}', min(normed / normed_before), max(normed / normed_before)) AS norm_now,
  fmt('{:.2f} to {:.2f}', min(control / control_before), max(control / control_before)) AS control_now FROM kernels_;

-- view timed
SELECT *, requests AS n, drafts AS k, cell, device_ms AS step, work_ms AS work, forward_ms AS forward,
  commit_ms AS writing
FROM windows WHERE device_ms IS NOT NULL AND against IS NULL;

-- view staged
SELECT s.*, off.step AS stock_step, off.work AS stock_work, off.forward AS stock_forward, aa.ratio_to_off AS aa, c.ratio_to_off AS control,
  CASE WHEN s.weights IS NULL THEN 'bf16' ELSE 'fp8' END AS bits, s.work_ratio_ci_high - s.work_ratio_ci_low AS wide
FROM timed s, timed off, timed aa, timed c
WHERE s.cell LIKE 'stage%' AND off.cell = 'off x off' AND aa.cell LIKE '%(A/A)' AND c.cell LIKE 'control%'
  AND (s.pair, s.gpu, s.n, s.k, s.revision, ifnull(s.weights, '')) = (off.pair, off.gpu, off.n, off.k, off.revision, ifnull(off.weights, ''))
  AND (s.pair, s.gpu, s.n, s.k, s.revision, ifnull(s.weights, '')) = (aa.pair, aa.gpu, aa.n, aa.k, aa.revision, ifnull(aa.weights, ''))
  AND (s.pair, s.gpu, s.n, s.k, s.revision, ifnull(s.weights, '')) = (c.pair, c.gpu, c.n, c.k, c.revision, ifnull(c.weights, ''));

-- view dense
SELECT * FROM staged AS s WHERE pair LIKE 'qwen3.5-27b%' AND k = 4 AND NOT EXISTS (
  SELECT 1 FROM staged AS later WHERE (later.pair, later.bits, later.n, later.k) = (s.pair, s.bits, s.n, s.k) AND s.revision = 'e5703d3c' AND later.revision <> s.revision);

-- values
SELECT fmt('{:.3f}', max(CASE WHEN bits = 'bf16' AND n = 1 THEN ratio_to_off END)) AS one, fmt('{:.3f}', max(CASE WHEN bits = 'bf16' AND n = 8 THEN ratio_to_off END)) AS eight,
  fmt('{:.3f}', max(CASE WHEN bits = 'bf16' AND n = 32 THEN ratio_to_off END)) AS many, fmt('{:.3f}', max(CASE WHEN n = 64 THEN ratio_to_off END)) AS most,
  fmt('{:.3f}', max(CASE WHEN bits = 'fp8' AND n = 32 THEN ratio_to_off END)) AS fp_many, fmt('{:.3f}', max(CASE WHEN n = 80 THEN ratio_to_off END)) AS fp_most,
  fmt('{:.1f}', max(CASE WHEN bits = 'bf16' AND n = 32 THEN stock_work END)) AS work, fmt('{:.1f}', max(CASE WHEN bits = 'bf16' AND n = 32 THEN stock_forward - forward END)) AS taken,
  fmt('{:.1f}', max(CASE WHEN bits = 'bf16' AND n = 32 THEN writing END)) AS added,
  fmt('{:.3f} to {:.3f}', min(control), max(control)) AS control
FROM dense;

-- values
SELECT fmt('{:.1f}', 2e-3 * cuda) AS nets, fmt('{:.1f}', 2e-3 * normed) AS ours FROM each_run
WHERE gpu = 'H200' AND states = 'f32' AND requests = 32;

-- values
SELECT fmt('{:.3f} and {:.3f}', max(CASE n WHEN 8 THEN ratio_to_off END), max(CASE n WHEN 32 THEN ratio_to_off END)) AS next,
  fmt('{:.3f} and {:.3f}', max(CASE n WHEN 8 THEN control END), max(CASE n WHEN 32 THEN control END)) AS next_control
FROM staged WHERE pair LIKE 'qwen3-next-80b%';

-- values
SELECT fmt('{:.1f}', 100 * (1 - work_ratio)) AS eight_work, fmt('{:.1f}', 100 * (1 - ratio_to_off)) AS eight_step, fmt('{:.1f}', stock_step - stock_work) AS eight_rest
FROM staged WHERE k = 8;

-- values
SELECT fmt('{:.3f}', ratio_to_off) AS quarter_most FROM staged WHERE pair LIKE 'qwen3.5-quarter%' AND n = 128 AND k = 4;

-- values
SELECT fmt('{:.2f}', -1e-6 * dram_write_bytes_minus_off_mean) AS unwritten, fmt('{:.2f}', -1e-6 * dram_write_bytes_minus_off_predicted) AS unwritten_said,
  fmt('{:.1f}', 1e-6 * dram_read_bytes_minus_off_mean) AS reread, fmt('{:.1f}', 1e-6 * dram_read_bytes_minus_off_predicted) AS reread_said
FROM dram WHERE nwor_mode = 'stage';

-- table kernels
SELECT states, requests || 'x' || drafts AS window, fmt('{:,.0f}', ours) AS ours, fmt('{:,.0f}', triton) AS "vLLM, Triton",
  fmt('{:.2f}', ours / triton) AS ratio, fmt('{:,.0f}', normed) AS "ours with norm", fmt('{:,.0f}', cuda) AS "vLLM, CUDA",
  fmt('{:.2f}', normed / cuda) AS "ratio ", fmt('{:,.0f}', control) AS control, fmt('{:,.0f}', ours_before) AS "ours before",
  fmt('{:,.0f}', normed_before) AS "with norm before"
FROM kernels_ ORDER BY states DESC, requests;

-- table engine
SELECT replace(pair, '-shape', '') AS model, bits AS weights, k, n AS requests, CASE revision WHEN 'e5703d3c' THEN 'before' ELSE 'now' END AS kernels, fmt('{:.2f}', stock_step) AS "stock, step",
  fmt('{:.2f}', stock_work) AS work, verdict, fmt('{:.0f}', groups) AS groups,
  fmt('{:.4f} [{:.4f}, {:.4f}]', ratio_to_off, ratio_ci_low, ratio_ci_high) AS "staged, step",
  fmt('{:+.2f} +- {:.2f}', 100 * (work_ratio - 1), 50 * wide) AS "work, %", fmt('{:.2f}', stock_forward - forward) AS "less forward",
  fmt('{:.2f}', writing) AS "commit", fmt('{:.4f}', control) AS control, fmt('{:.4f}', aa) AS "A/A"
FROM staged ORDER BY pair LIKE '%quarter%', pair DESC, bits, k, n, revision DESC;

-- values
SELECT fmt('{:.2f} and {:.2f}', min(ratio), max(ratio)) AS one_slot, max(stock) AS stock_at_once, max(own) AS own_at_once FROM (
SELECT phase, max(CASE WHEN cell LIKE 'stage%' THEN tokens_per_s END) / max(CASE WHEN cell = 'off x off' THEN tokens_per_s END) AS ratio,
  max(CASE WHEN cell = 'off x off' THEN at_once END) AS stock, max(CASE WHEN cell LIKE 'stage%' THEN at_once END) AS own
FROM one_slot GROUP BY phase);

-- table one_state_slot
SELECT phase, cell, parity AS tokens, at_once AS "requests at once", windows, fmt('{:.1f}', latency_ms / 1000) AS seconds,
  fmt('{:,.0f}', tokens_per_s) AS "tokens/s" FROM one_slot ORDER BY block, rowid;

-- view fusing
SELECT k, n AS requests, step, work, writing AS "commit", 0.5 * writing AS half,
  (both_us - fused_us) / commit_us AS part, (both_us - fused_us) / commit_us * writing AS saved
FROM timed JOIN fused ON fused.requests = n AND states = 'f32' AND fused.drafts = k
WHERE pair LIKE 'qwen3.5-quarter%' AND k = 4 AND cell LIKE 'stage%';

-- values
SELECT fmt('{:.1f}', max(50 * writing / step)) AS half_of_step, fmt('{:.1f}', max(writing / step) * max(100 * part)) AS saved_of_step,
  fmt('{:.0f}', max(100 * part)) AS part FROM dense, (SELECT max(part) AS part FROM fusing);

-- values
SELECT fmt('{:.0f} to {:.0f}', min(100 * (both_us - fused_us) / commit_us), max(100 * (both_us - fused_us) / commit_us)) AS sixteen
FROM fused WHERE states = 'bf16' AND drafts = 4;

-- table would_one_kernel
SELECT k, requests, fmt('{:.2f}', step) AS step, fmt('{:.2f}', "commit") AS "commit", fmt('{:.1f}', 100 * half / step) AS "half of it, % of the step",
  fmt('{:.1f}', 100 * half / work) AS "% of the work", fmt('{:+.0f}', 100 * part) AS "prototypes saved, % of the commit",
  fmt('{:+.1f}', 100 * saved / step) AS "% of the step ", fmt('{:+.1f}', 100 * saved / work) AS "% of the work "
FROM fusing ORDER BY k, requests;

-- values
SELECT fmt('{:.2f} to {:.2f}', min(CASE WHEN requests > 1 THEN verify END), max(CASE WHEN requests > 1 THEN verify END)) AS own_verify,
  fmt('{:.2f} to {:.2f}', min(CASE WHEN requests > 1 THEN both END), max(CASE WHEN requests > 1 THEN both END)) AS own_both,
  fmt('{:.2f}', max(CASE WHEN requests = 1 THEN both END)) AS own_one
FROM (SELECT requests, ring_verify_5_live_us / verify_us AS verify,
  (ring_verify_5_live_us + ring_commit_20_full_us) / (verify_us + commit_us) AS both FROM own_rings);

-- table own_rings
SELECT states, requests || 'x' || drafts AS window, fmt('{:.1f}', verify_us) AS verify, fmt('{:.1f}', commit_us) AS "commit",
  fmt('{:.1f}', ring_verify_5_live_us) AS "ring, verify", fmt('{:.1f}', ring_commit_20_full_us) AS "ring, commit",
  fmt('{:.2f}', (ring_verify_5_live_us + ring_commit_20_full_us) / (verify_us + commit_us)) AS ratio
FROM own_rings ORDER BY states DESC, drafts, requests;

-- view engine_windows
SELECT *, 1e3 * requests * s / drafts AS ms FROM engines;

-- view beside
SELECT run, pair, requests, gpu, rings.weights, base.engine AS base, count(*) AS rounds, median(rings.ms / base.ms) AS middle, median(again.ms / base.ms) AS noise,
  fmt('{:.3f} [{:.3f}, {:.3f}]', median(rings.ms / base.ms), median_low(rings.ms / base.ms), median_high(rings.ms / base.ms)) AS rings,
  fmt('{:.3f} [{:.3f}, {:.3f}]', median(again.ms / base.ms), median_low(again.ms / base.ms), median_high(again.ms / base.ms)) AS again,
  fmt('{:.0f} to {:.0f}', min(rings.ms), max(rings.ms)) AS spread, median(base.ms) AS base_ms, median(rings.ms) AS rings_ms
FROM engine_windows AS rings JOIN engine_windows AS base USING (run, pair, requests, gpu, round) JOIN engine_windows AS again USING (run, pair, requests, gpu, round)
WHERE rings.engine = 'rings' AND again.engine = base.engine || ' again' GROUP BY run, pair, requests, base.engine;

-- values
SELECT max(CASE WHEN pair LIKE '%quarter%' THEN rings END) AS engine_rings, max(CASE WHEN pair LIKE '%quarter%' THEN spread END) AS engine_window,
  max(CASE WHEN base = 'slot' AND pair LIKE '%27b%' AND requests = 32 THEN rings END) AS rings_32, max(CASE WHEN base = 'slot' AND requests = 80 THEN rings END) AS rings_80,
  max(CASE WHEN base = 'stock' AND requests = 32 AND rounds > 3 THEN rings END) AS rings_stock, fmt('{:.1f}', 100 * max(CASE WHEN base = 'stock' AND rounds > 3 THEN abs(noise - 1) END)) AS stock_again,
  max(CASE WHEN base = 'stock' AND requests = 1 THEN rings END) AS stock_1, max(CASE WHEN base = 'stock' AND requests = 8 THEN rings END) AS stock_8,
  max(CASE WHEN base = 'stock' AND requests = 64 THEN rings END) AS stock_64, max(CASE WHEN base = 'stock' AND requests = 80 THEN rings END) AS stock_80,
  fmt('{:.3f}', max(CASE WHEN base = 'stock' AND rounds = 3 THEN middle END)) AS rings_first FROM beside;

-- table engines_beside
SELECT replace(pair, '-shape', '') AS model, CASE WHEN weights IS NULL THEN 'bf16' ELSE 'fp8' END AS weights, requests, gpu AS "GPU",
  CASE base WHEN 'slot' THEN 'a commit in every window' ELSE base END AS beside, rounds,
  fmt('{:.1f}', base_ms) AS "its window, ms", fmt('{:.1f}', rings_ms) AS "with rings, ms", rings AS "rings over it", again AS "itself again"
FROM beside WHERE rounds > 3 ORDER BY pair, requests, base DESC;

-- view counted
SELECT engine, avg(dram_read_bytes) / 1e9 AS read, avg(dram_write_bytes) / 1e9 AS written, avg(predicted_read) / 1e9 AS read_said, avg(predicted_written) / 1e9 AS written_said
FROM ring_dram GROUP BY engine;

-- values
SELECT fmt('{:.2f}', rings.read - stock.read) AS ring_read, fmt('{:.2f}', rings.read_said - stock.read_said) AS ring_read_said,
  fmt('{:.2f}', stock.written - rings.written) AS ring_unwritten, fmt('{:.2f}', stock.written_said - rings.written_said) AS ring_unwritten_said,
  fmt('{:.2f}', stock.read_said + stock.written_said + rings.read + rings.written - stock.read - stock.written) AS ring_moved,
  fmt('{:.2f}', rings.read_said + rings.written_said) AS ring_moved_said
FROM counted AS rings JOIN counted AS stock ON rings.engine = 'rings' AND stock.engine = 'stock';

-- view rings
SELECT model, states, requests, drafts, max(us_layer * (name = 'today')) AS verify, max(us_layer * (name = 'commit')) AS writing,
  max(us_layer * (name = CASE states WHEN 'f32' THEN 'before maxnreg 168' ELSE 'before' END)) AS ring,
  max(us_layer * (name = 'flush, those that are full')) AS flush, max(us_layer * (name = 'stock')) AS stock,
  max(us_layer * (name = 'copy of as many bytes')) AS copied
FROM lazy GROUP BY 1, 2, 3, 4;

-- values
SELECT fmt('{:.2f} to {:.2f}', min((ring + flush) / (verify + writing)), max((ring + flush) / (verify + writing))) AS ring_both,
  fmt('{:.2f} to {:.2f}', min(ring / verify), max(ring / verify)) AS ring_verify FROM rings WHERE requests > 1;

-- values
SELECT fmt('{:.2f}', max(CASE WHEN own.requests = 32 THEN own.verify_us / copied END)) AS copy_32, fmt('{:.2f}', max(CASE WHEN own.requests = 128 THEN own.verify_us / copied END)) AS copy_128
FROM own_rings AS own JOIN rings USING (requests, drafts) WHERE model = '27B' AND rings.states = 'f32' AND own.states = 'float32' AND drafts = 4;

-- table rings
SELECT model, states, requests || 'x' || drafts AS window, fmt('{:.1f}', verify) AS verify, fmt('{:.1f}', writing) AS "commit", fmt('{:.1f}', ring) AS "ring, verify",
  fmt('{:.1f}', flush) AS "ring, commit", fmt('{:.2f}', (ring + flush) / (verify + writing)) AS ratio, fmt('{:.1f}', stock) AS "vLLM, CUDA", fmt('{:.1f}', copied) AS "a copy"
FROM rings ORDER BY model, states DESC, drafts, requests;

-- values
SELECT fmt('{:.0f}', 100 * max(CASE variant WHEN 'before' THEN stall_long_scoreboard / stalls END)) AS waits_memory,
  fmt('{:.0f}', 100 * max(CASE variant WHEN 'before' THEN (stall_barrier + stall_short_scoreboard) / stalls END)) AS waits_others,
  fmt('{:.0f}', max(CASE variant WHEN 'before' THEN tensor_pipe END)) AS tensor_busy,
  fmt('{:.0f}', max(CASE variant WHEN 'before' THEN dram_of_peak END)) AS of_peak,
  fmt('{:.2f}', max(CASE variant WHEN 'early, cut3' THEN us END) / max(CASE variant WHEN 'before' THEN us END)) AS early_cut
FROM verify;

-- table verify
SELECT variant, fmt('{:.0f}', predicted_us) AS "predicted, us", fmt('{:.1f}', us) AS us, fmt('{:.2f}', dram_tb_s) AS "DRAM, TB/s",
  fmt('{:.0f}', issue_slots_busy) AS "issuing, %", registers, fmt('{:,.0f}', spilling_requests) AS spills,
  fmt('{:.2f}', stall_long_scoreboard) AS "memory", fmt('{:.2f}', stall_barrier) AS barriers, fmt('{:.2f}', stall_short_scoreboard) AS "shared memory",
  fmt('{:.2f}', stalls - stall_long_scoreboard - stall_barrier - stall_short_scoreboard) AS rest
FROM verify;
