-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view loads
SELECT own.*,
  CASE WHEN own.mode <> base.mode THEN own.median_tpot_ms / base.median_tpot_ms END AS tpot,
  CASE WHEN own.mode <> base.mode THEN own.output_throughput / base.output_throughput END AS speed,
  CASE own.machine WHEN 'h200 compiled' THEN 'compiled' WHEN 'h200' THEN 'full graphs' WHEN 'h200 short' THEN 'full graphs, short rounds' END AS host,
  instr('stock off stage interleave', own.mode) AS place
FROM serving AS own LEFT JOIN serving AS base ON own.machine = base.machine AND own.load = base.load AND own.round = base.round
  AND base.mode = CASE own.machine WHEN 'cpu' THEN 'off' ELSE 'stock' END
WHERE own.rate IS NOT NULL;

-- view direct
SELECT mode, load, fmt('{:.2f} [{:.2f}, {:.2f}]', median(tpot), median_low(tpot), median_high(tpot)) AS said, count(tpot) AS rounds
FROM loads WHERE host IS NOT NULL AND mode <> 'stock' GROUP BY mode, load;

-- values
SELECT said AS half, rounds FROM direct WHERE mode = 'stage' AND load = '50%';

-- values
SELECT said AS turns FROM direct WHERE mode = 'interleave' AND load = '50%';

-- values
SELECT said AS most FROM direct WHERE mode = 'stage' AND load = '90%';

-- values
SELECT said AS turns_most FROM direct WHERE mode = 'interleave' AND load = '90%';

-- values
SELECT fmt('{:.2f}', median(CASE load WHEN '50%' THEN tpot END)) AS staged_half,
  fmt('{:.2f}', median(CASE load WHEN '90%' THEN tpot END)) AS staged_most
FROM loads WHERE machine = 'h200 staged' AND mode = 'stage';

-- values
SELECT fmt('{:.2f} to {:.2f}', min(middle), max(middle)) AS speeds FROM
  (SELECT median(speed) AS middle FROM loads WHERE host IS NOT NULL AND mode <> 'stock' GROUP BY machine, mode, load);

-- values
SELECT fmt('{:,.0f}', sum(completed)) AS requests, sum(failed) AS failed, sum(NOT same_answers) AS other_answers,
  sum(coalesce(nwor_live_staging_stopped_total, 0) > 0) AS stopped
FROM loads WHERE mode IN ('stage', 'interleave');

-- view capacities
SELECT machine, request_throughput AS per_s FROM serving WHERE rate IS NULL;

-- values
SELECT fmt('{:.0f}', max(CASE machine WHEN 'h200 compiled' THEN per_s END)) AS compiled,
  fmt('{:.0f}', max(CASE machine WHEN 'h200' THEN per_s END)) AS plain,
  fmt('{:.0f}', max(CASE machine WHEN 'h200 short' THEN per_s END)) AS short,
  fmt('{:.0f}', max(CASE machine WHEN 'h200 staged' THEN per_s END)) AS staged,
  fmt('{:.1f}', max(CASE machine WHEN 'cpu' THEN per_s END)) AS cpu
FROM capacities;

-- view over_off
SELECT own.mode, own.ms / off.ms AS ratio FROM steps AS own JOIN steps AS off USING (rate, block, kind)
WHERE off.mode = 'off' AND kind = 'with a prefill';

-- values
SELECT fmt('{:.1f} to {:.1f}', min(CASE mode WHEN 'beside' THEN ratio END), max(CASE mode WHEN 'beside' THEN ratio END)) AS beside,
  fmt('{:.1f} to {:.1f}', min(CASE mode WHEN 'stage' THEN ratio END), max(CASE mode WHEN 'stage' THEN ratio END)) AS stage,
  fmt('{:.1f} to {:.1f}', min(CASE mode WHEN 'stock' THEN ratio END), max(CASE mode WHEN 'stock' THEN ratio END)) AS stock
FROM over_off;

-- view same
SELECT own.rate, own.block, own.kind, own.mode, own.ms / stock.ms AS ratio, own.ms AS ms FROM paired AS own
JOIN paired AS stock USING (rate, block, kind) WHERE stock.mode = 'stock' AND own.mode <> 'stock';

-- values
SELECT fmt('{:.2f}', max(CASE WHEN mode = 'stage' AND rate = 38 THEN middle END)) AS s38,
  fmt('{:.2f}', max(CASE WHEN mode = 'stage' AND rate = 66 THEN middle END)) AS s66,
  fmt('{:.2f}', max(CASE WHEN mode = 'interleave' AND rate = 38 THEN middle END)) AS i38,
  fmt('{:.2f}', max(CASE WHEN mode = 'interleave' AND rate = 66 THEN middle END)) AS i66
FROM (SELECT mode, rate, median(ratio) AS middle FROM same WHERE kind = 'time per token' GROUP BY mode, rate);

-- table much_staging_interleaving
SELECT kind, rate AS "requests/s", mode, count(*) AS blocks, fmt('{:.2f}', median(ms)) AS ms,
  fmt('{:.3f} [{:.3f}, {:.3f}]', median(ratio), median_low(ratio), median_high(ratio)) AS "over stock"
FROM same GROUP BY kind, rate, mode;

-- table one_h200_drafts
SELECT host AS server, mode, load, count(*) AS rounds, fmt('{:,.0f}', sum(completed)) AS requests,
  fmt('{:.2f}', median(median_tpot_ms)) AS "TPOT p50, ms",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(tpot), min(tpot), max(tpot)) AS "over stock's",
  fmt('{:,.0f}', median(output_throughput)) AS "tokens/s",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(speed), min(speed), max(speed)) AS "over stock"
FROM loads WHERE host IS NOT NULL GROUP BY host, load, place;

-- table one_h200_drafts_2
SELECT mode, load, count(*) AS rounds, fmt('{:,.0f}', sum(completed)) AS requests,
  fmt('{:.2f}', median(median_tpot_ms)) AS "TPOT p50, ms",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(tpot), min(tpot), max(tpot)) AS "over stock's",
  fmt('{:,.0f}', median(output_throughput)) AS "tokens/s",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(speed), min(speed), max(speed)) AS "over stock"
FROM loads WHERE machine = 'h200 staged' GROUP BY load, place;

-- pivot steps_take_longer
SELECT kind AS step, fmt('{:.0f}', rate) AS "requests/s", mode, fmt('{:.1f}', median(ms)) FROM steps
GROUP BY kind, rate, mode ORDER BY kind DESC, rate, instr('stock off stage interleave beside', mode);

-- table two_cores_cpu
SELECT mode, load, count(*) AS rounds, fmt('{:,.0f}', sum(completed)) AS requests,
  fmt('{:.2f}', median(median_tpot_ms)) AS "TPOT p50, ms",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(tpot), min(tpot), max(tpot)) AS "over off's",
  fmt('{:,.0f}', median(output_throughput)) AS "tokens/s",
  fmt('{:.2f} ({:.2f} to {:.2f})', median(speed), min(speed), max(speed)) AS "over off"
FROM loads WHERE machine = 'cpu' GROUP BY load, place;

-- view in_flight_pairs
SELECT own.*, own.tokens_per_s / stock.tokens_per_s AS speed, own.tpot_ms / stock.tpot_ms AS tpot
FROM in_flight AS own JOIN in_flight AS stock USING (pair, run, requests, block) WHERE stock.mode = 'stock';

-- view servers
SELECT pair, requests, mode, run, fmt('{:.3f} [{:.3f}, {:.3f}]', median(speed), median_low(speed), median_high(speed)) AS said,
  fmt('{:.0f}', median(1e3 * s / windows)) AS window, fmt('{:.0f}', 100.0 * sum(beside_prefill) / sum(windows)) AS direct
FROM in_flight_pairs WHERE mode = 'stage' OR mode = 'rings' GROUP BY pair, requests, mode, run;

-- values
SELECT max(CASE WHEN pair = 'qwen3.5-27b-shape' AND mode = 'stage' THEN said END) AS server_27b, max(CASE WHEN mode = 'rings' AND run = 1 THEN said END) AS server_few,
  max(CASE WHEN mode = 'rings' AND run = 3 THEN said END) AS server_eager, max(CASE WHEN mode = 'rings' AND run = 4 THEN said END) AS server_rings,
  max(CASE WHEN mode = 'rings' AND run = 3 THEN window END) AS window_eager, max(CASE WHEN mode = 'rings' AND run = 4 THEN window END) AS window_rings,
  max(CASE WHEN mode = 'rings' AND run = 3 THEN direct END) AS direct_eager, max(CASE WHEN mode = 'rings' AND run = 4 THEN direct END) AS direct_rings,
  max(CASE pair WHEN 'llama-3b-shape' THEN said END) AS server_3b, max(CASE pair WHEN 'qwen3.5-quarter-shape' THEN said END) AS server_hybrid,
  max(CASE pair WHEN 'llama-3b-shape' THEN window END) AS window_3b,
  max(CASE WHEN pair = 'llama-8b-shape' AND requests = 64 THEN said END) AS server_64, max(CASE WHEN pair = 'llama-8b-shape' AND requests = 256 THEN said END) AS server_256,
  max(CASE WHEN pair = 'llama-8b-shape' AND requests = 64 THEN direct END) AS direct_64, max(CASE WHEN pair = 'llama-8b-shape' AND requests = 256 THEN direct END) AS direct_256,
  max(CASE WHEN pair = 'llama-8b-shape' AND requests = 64 THEN window END) AS window_64, max(CASE WHEN pair = 'llama-8b-shape' AND requests = 256 THEN window END) AS window_256
FROM servers;

-- view sums
SELECT run, sum(alone * alone) AS aa, sum(alone * beside_prefill) AS ab, sum(beside_prefill * beside_prefill) AS bb, sum(alone * s) AS sa, sum(beside_prefill * s) AS sb
FROM (SELECT *, windows - beside_prefill AS alone FROM in_flight WHERE mode = 'rings') GROUP BY run;

-- view least_squares
SELECT run, 1e3 * (sa * bb - sb * ab) / (aa * bb - ab * ab) AS alone, 1e3 * (sb * aa - sa * ab) / (aa * bb - ab * ab) AS beside FROM sums;

-- values
SELECT fmt('{:.0f}', max(CASE run WHEN 3 THEN alone END)) AS alone_eager, fmt('{:.0f}', max(CASE run WHEN 4 THEN alone END)) AS alone_compiled,
  fmt('{:.0f}', max(CASE run WHEN 3 THEN beside END)) AS beside_eager, fmt('{:.0f}', max(CASE run WHEN 4 THEN beside END)) AS beside_compiled FROM least_squares;

-- table always_in_flight
SELECT replace(pair, '-shape', '') AS model, compiled, requests AS "in flight", mode, count(*) AS blocks,
  fmt('{:,.0f}', median(tokens_per_s)) AS "tokens/s",
  CASE WHEN mode <> 'stock' THEN fmt('{:.3f} [{:.3f}, {:.3f}]', median(speed), median_low(speed), median_high(speed)) END AS "over stock",
  fmt('{:.2f}', median(tpot_ms)) AS "TPOT, ms",
  CASE WHEN mode <> 'stock' THEN fmt('{:.3f} [{:.3f}, {:.3f}]', median(tpot), median_low(tpot), median_high(tpot)) END AS "over stock's",
  fmt('{:.0f}', 100.0 * sum(beside_prefill) / sum(windows)) AS "written directly beside a prefill, %"
FROM in_flight_pairs GROUP BY pair, run, requests, mode ORDER BY pair, run, requests, instr('stock stage beside rings', mode);
