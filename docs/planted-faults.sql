-- Fills the page of the same name: see sweeps/studies/tables.py.
-- Planted-fault tests append to outcomes.csv: NWOR_BENCH_PLANTED=sweeps/studies/planted-faults make test ARGS="-k planted".
-- faults.csv is written by hand; a test compares its names with the planted faults.
-- tables from ../sweeps/studies/planted-faults

-- view latest
SELECT o.engine, place, title, fault, checks, device, vllm, torch, max(o.rowid) AS recorded
FROM outcomes o JOIN (
  SELECT 'cpu' AS engine, 1 AS place, 'CPU, tiny pair' AS title
  UNION ALL VALUES ('cpu-states', 2, 'CPU, tiny hybrid'), ('gpu-real-full', 3, 'GPU, real weights'),
    ('gpu-shape-full', 4, 'GPU, 3B shape, 8 layers'), ('gpu-states-full', 5, 'GPU, hybrid')
) USING (engine) GROUP BY o.engine, fault;

-- view machines
SELECT engine, fmt('{}, vLLM {}, torch {}', device, vllm, torch) AS machine, max(recorded) FROM latest GROUP BY engine;

-- values
SELECT max(CASE engine WHEN 'cpu' THEN machine END) AS cpu, max(CASE engine WHEN 'cpu-states' THEN machine END) AS cpu_states,
  max(CASE engine WHEN 'gpu-real-full' THEN machine END) AS gpu_real,
  max(CASE engine WHEN 'gpu-shape-full' THEN machine END) AS gpu_shape,
  max(CASE engine WHEN 'gpu-states-full' THEN machine END) AS gpu_states
FROM machines;

-- view rows
SELECT 'none (sound run)' AS fault, 0 AS line UNION ALL SELECT name, rowid FROM faults;

-- pivot faults
SELECT fault AS Fault, ifnull(title, 'CPU, tiny pair'),
  CASE WHEN engine IS NULL THEN ''
    WHEN line = 0 THEN ifnull('FALSE ALARM: ' || replace(checks, ';', ','), 'passes')
    WHEN checks IS NULL THEN 'NOT CAUGHT'
    WHEN instr(checks, ';') THEN replace(checks, ';', ',')
    ELSE '**Only** ' || checks END
FROM rows LEFT JOIN latest USING (fault) ORDER BY line, place;

-- view seen
SELECT fault, value AS seen_by, checks = value AS alone
FROM latest, json_each('["' || replace(checks, '; ', '","') || '"]') WHERE checks IS NOT NULL;

-- view needed
SELECT seen_by, group_concat(fault, '; ') AS which, count(*) AS only_it
FROM (SELECT DISTINCT seen_by, fault FROM seen WHERE alone ORDER BY fault) GROUP BY seen_by;

-- table checks
SELECT seen_by AS "Check", count(DISTINCT fault) AS "Faults it sees", ifnull(only_it, 0) AS "Faults that only it sees", which AS "Which"
FROM seen LEFT JOIN needed USING (seen_by) GROUP BY seen_by ORDER BY 2 DESC, 1;

-- view sizes
SELECT s.rowid AS place, engine, fault, fmt('{:g}', smallest) AS smallest FROM smallest s;

-- view alike
SELECT engine, min(place) AS first, group_concat(fault || smallest, ';') AS every
FROM (SELECT * FROM sizes ORDER BY fault) GROUP BY engine;

-- view headings
SELECT min(first) AS first, every, group_concat(engine, '; ') AS heading FROM (SELECT * FROM alike ORDER BY first) GROUP BY every;

-- pivot sizes
SELECT fault AS Fault, heading, smallest
FROM sizes JOIN alike USING (engine) JOIN headings h USING (every)
ORDER BY h.first, place;
