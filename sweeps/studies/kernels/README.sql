-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view timed
SELECT *, rowid AS row, requests || 'x' || drafts || ifnull(', ' || acceptance, '') || ifnull(', ' || CAST(context AS INTEGER), '') AS "case",
  replace(kernel || ', ' || cache_dtype || ' cache', 'mask, bf16 cache', 'mask') AS name,
  CASE status WHEN 'OK' THEN fmt('{:.2f}', time_us) || ifnull(' (' || fmt('{:.2f}', ratio) || ')', '') ELSE status END AS cell
FROM kernels;

-- view comparisons
SELECT 1 AS place, 'commit of 32 staged tokens against vLLM''s write, layer by layer' AS comparison, *
FROM timed WHERE kernel = 'commit' AND implementation = 'vllm_cuda' AND staged_tokens = 32
UNION ALL
SELECT 2, 'commit of 512 staged tokens against the same', *
FROM timed WHERE kernel = 'commit' AND implementation = 'vllm_cuda' AND staged_tokens = 512
UNION ALL
SELECT 3, 'verify_attention against FlashAttention 3, bf16, k = 4, 8 and 64 requests', *
FROM timed WHERE kernel = 'verify_attention' AND implementation = 'flash_attention_3' AND cache_dtype = 'bf16' AND drafts = 4
  AND requests IN (8, 64);

-- view worst
SELECT place, comparison, count(*) AS cases, min(ratio) AS ratio, ratio_low, ratio_high, "case", cache_dtype
FROM comparisons WHERE status = 'OK' GROUP BY place;

-- view shown
SELECT * FROM timed WHERE implementation IN ('nwor', 'vllm_cuda', 'flash_attention_3');

-- values
SELECT fmt('{:.3g}', max(CASE place WHEN 1 THEN ratio END)) AS few, fmt('{:.3g}', max(CASE place WHEN 2 THEN ratio END)) AS many,
  fmt('{:.0f}', 100 * max(CASE place WHEN 3 THEN 1 / ratio - 1 END)) AS attention
FROM worst;

-- view candidates
SELECT rowid AS case_id, 'ours' AS contender, ours AS ratio FROM attention
UNION ALL SELECT rowid, 'ours4', ours4 FROM attention
UNION ALL SELECT rowid, 'ours32', ours32 FROM attention
UNION ALL SELECT rowid, 'merge', merge FROM attention;

-- view chosen
SELECT attention.*, (context / 1024) || 'k' AS length, heads || '/' || kv_heads AS shape, requests || 'x' || drafts AS window,
  contender, min(ratio) AS best
FROM attention JOIN candidates ON case_id = attention.rowid WHERE ratio IS NOT NULL GROUP BY attention.rowid;

-- values
SELECT count(*) AS cases, sum(best < 0.9) AS below_90, sum(best < 1) AS below_1, sum(best >= 1) AS direct,
  sum(context = 1024 AND cache = 'bf16') AS short, sum(context = 1024 AND cache = 'bf16' AND best < 0.9) AS short_90,
  fmt('{:.2f}', max(CASE WHEN context = 1024 AND cache = 'bf16' THEN best END)) AS short_worst
FROM chosen;

-- table our_kernels_against
SELECT comparison, cases, fmt('{:.3g} [{:.3g}, {:.3g}] ({}, {})', ratio, ratio_low, ratio_high, "case", cache_dtype) AS "lowest time over ours"
FROM worst;

-- pivot commit_bf16_cache
SELECT "case", implementation, cell FROM shown WHERE name = 'commit, bf16 cache';

-- pivot commit_fp8_cache
SELECT "case", implementation, cell FROM shown WHERE name = 'commit, fp8 cache';

-- pivot verify_attention_bf16
SELECT "case", implementation, cell FROM shown WHERE name = 'verify_attention, bf16 cache';

-- pivot verify_attention_fp8
SELECT "case", implementation, cell FROM shown WHERE name = 'verify_attention, fp8 cache';

-- table attends_window_contenders
SELECT cache, length AS context, count(*) AS cases, sum(best < 0.9) AS "below 0.90", sum(best < 1) AS "below 1.00",
  sum(best >= 1) AS "stock is the fastest"
FROM chosen GROUP BY cache, context;

-- pivot attends_window_contenders_2
SELECT shape || CASE head_dim WHEN 128 THEN '' ELSE ' of ' || head_dim END AS heads, cache, length AS context, window,
  CASE WHEN best < 1 THEN contender || ' ' || fmt('{:.2f}', best) ELSE 'stock (' || fmt('{:.2f}', best) || ')' END AS cell
FROM chosen ORDER BY cache, head_dim, chosen.heads, kv_heads DESC, chosen.context, requests, drafts;
