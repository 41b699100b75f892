-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view costs
SELECT own.code, own.round, own.cell, own.sum_us, own.window_ms, own.sum_us / own.window_ms AS share,
  own.sum_us / own.window_ms - base.sum_us / base.window_ms AS more
FROM host AS own JOIN host AS base ON base.code = own.code AND base.round = own.round AND base.cell = 'off x off';

-- values
SELECT fmt('{:.0f}', 6.4 * avg(CASE WHEN code = 'after' AND cell = 'stage x adaptive' THEN more END)) AS adaptive,
  fmt('{:.0f}', 6.4 * avg(CASE WHEN code = 'before' AND cell = 'stage x adaptive' THEN more END)) AS adaptive_before,
  fmt('{:.0f}', 6.4 * avg(CASE WHEN code = 'after' AND cell = 'stage x graph' THEN more END)) AS graph FROM costs;

-- values
SELECT fmt('{:.1f}', max(CASE code WHEN 'after' THEN switch_us END)) AS switch,
  fmt('{:.0f}', max(CASE code WHEN 'before' THEN switch_us END)) AS switch_before FROM host;

-- values
SELECT fmt('{:.1f}', 100 * (ratio_high - 1)) AS most FROM nvtx WHERE what = 'nvtx on / off';

-- table host_time_hook
SELECT cell, code, CAST(round AS INTEGER) AS round, fmt('{:.1f}', sum_us) AS "host, us", fmt('{:.2f}', window_ms) AS "window, ms",
  fmt('{:.1f}', share) AS "us a ms", CASE cell WHEN 'off x off' THEN '' ELSE fmt('{:.1f}', more) END AS "over off x off"
FROM costs ORDER BY instr('off x off stage x graph stage x adaptive', cell), code DESC, round;

-- table nvtx_ranges
SELECT pair, n AS blocks, what, fmt('{:.4f} [{:.4f}, {:.4f}]', ratio, ratio_low, ratio_high) AS ratio FROM nvtx;
