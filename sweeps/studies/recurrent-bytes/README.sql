-- Fills the page of the same name: see sweeps/studies/tables.py.

-- view windows_
SELECT *, (written_bytes - predicted_written_bytes) / requests / (draft_tokens + 1) / 1e6 AS rest,
  100.0 * predicted_written_bytes / written_bytes AS share,
  100.0 * requests * draft_tokens * state_bytes / written_bytes AS saved
FROM states;

-- view slopes
SELECT most.draft_tokens, (most.written_bytes - fewer.written_bytes) / 24e6 AS written,
  (most.read_bytes - fewer.read_bytes) / 24e6 AS read,
  (most.predicted_written_bytes - fewer.predicted_written_bytes) / 24e6 AS stored,
  (most.predicted_read_bytes - fewer.predicted_read_bytes) / 24e6 AS loaded
FROM states AS most JOIN states AS fewer USING (draft_tokens) WHERE most.requests = 32 AND fewer.requests = 8;

-- view drafts
SELECT (more.written - less.written) / (more.draft_tokens - less.draft_tokens) AS written,
  (more.stored - less.stored) / (more.draft_tokens - less.draft_tokens) AS stored
FROM slopes AS more JOIN slopes AS less ON less.draft_tokens * 2 = more.draft_tokens;

-- values
SELECT fmt('{:.1f} to {:.1f}', min(written), max(written)) AS position, fmt('{:.1f}', max(stored)) AS stored FROM drafts;

-- values
SELECT fmt('{:.0f} to {:.0f}', min(read), max(read)) AS read, fmt('{:.0f}', max(loaded)) AS loaded FROM slopes;

-- values
SELECT fmt('{:.0f} to {:.0f}', min(share), max(share)) AS share, fmt('{:.0f} to {:.0f}', min(saved), max(saved)) AS saved,
  fmt('{:.1f}', max(state_bytes) / 1e6) AS state, fmt('{:.2f}', 100 * max(abs(copy_ratio - 1))) AS off
FROM windows_;

-- values
SELECT fmt('{:.1f} to {:.1f}', min(rest), max(rest)) AS rest FROM windows_ WHERE requests > 1;

-- table many_bytes_stock
SELECT draft_tokens AS drafts, requests, fmt('{:,.0f}', read_bytes / 1e6) AS read,
  fmt('{:,.0f}', predicted_read_bytes / 1e6) AS predicted, fmt('{:,.0f}', written_bytes / 1e6) AS written,
  fmt('{:,.0f}', predicted_written_bytes / 1e6) AS "states, predicted", fmt('{:.1f}', rest) AS "rest a token"
FROM windows_;
