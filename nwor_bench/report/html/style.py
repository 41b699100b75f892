"""The HTML report's style sheet: light and dark, and narrow enough for a phone."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fcfcfb; --text: #1c1f23; --soft: #5c6570; --line: #d9dde2; --head: #f1f3f5;
  --callout: #fff6e0; --callout-line: #d99a1b; --band: #e3e7ec; --link: #1f5f9c;
  --same: #2f7d4f; --faster: #1f6fb2; --slower: #b4541a; --ambiguous: #6b7280;
  --ineffective: #8a4bb0; --invalid: #c02634;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e4e7ea; --soft: #9aa4af; --line: #343b43; --head: #1e2329;
    --callout: #2c2512; --callout-line: #c9932c; --band: #2b323a; --link: #7fb8ee;
    --same: #6cc48f; --faster: #6db3ec; --slower: #f09a5c; --ambiguous: #a3acb8;
    --ineffective: #c594e6; --invalid: #ff7b86;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 {
  font-size: 1.15rem; margin: 1.8rem 0 .6rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line);
}
summary { cursor: pointer; }
summary h2 { display: inline; border: 0; margin: 0; padding: 0; }
details { margin: .6rem 0; padding: .35rem 0; border-bottom: 1px solid var(--line); }
a { color: var(--link); }
p, ul, dl { margin: .75rem 0; max-width: 46rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
li { margin: .35rem 0; }
dt { font-weight: 600; margin-top: .7rem; }
dd { margin: 0 0 0 1rem; }
.strong { font-size: 1.08rem; font-weight: 600; }
.headline { font-size: 1.15rem; font-weight: 600; line-height: 1.45; }
.badge {
  display: inline-block; padding: .05rem .5rem; border-radius: 4px; font-size: .85em;
  color: var(--page); background: var(--soft);
}
.b-same { background: var(--same); } .b-faster { background: var(--faster); }
.b-slower { background: var(--slower); } .b-ineffective { background: var(--ineffective); }
.b-invalid { background: var(--invalid); }
nav { margin: 1.5rem 0; font-size: .875rem; max-width: 46rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .35rem 1rem; padding: 0; list-style: none; }
nav li { margin: 0; }
.callout {
  margin: 1rem 0; padding: .7rem 1rem; max-width: 46rem; background: var(--callout);
  border-left: 4px solid var(--callout-line); border-radius: 0 4px 4px 0; overflow-wrap: anywhere;
}
.callout strong { display: block; }
.scroll {
  overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; max-width: 100%;
}
table {
  border-collapse: separate; border-spacing: 0; font-size: .875rem;
  font-variant-numeric: tabular-nums;
}
caption {
  text-align: left; padding: .4rem .7rem; color: var(--soft); font-size: .8125rem;
  border-bottom: 1px solid var(--line);
}
caption span {  /* stays in sight where the table scrolls */
  display: block; position: sticky; left: .7rem; width: min(100%, 100vw - 3.6rem);
}
th, td { padding: .22rem .7rem; text-align: left; white-space: nowrap; vertical-align: top; }
th { background: var(--head); font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody th { background: var(--page); white-space: nowrap; vertical-align: top; }
thead th:first-child, tbody th { position: sticky; left: 0; }
tr + tr td, tr + tr th { border-top: 1px solid var(--line); }
td.long { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
th.long { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
.words td { white-space: normal; min-width: 6rem; }
.words td.long { min-width: 11rem; }
.number { text-align: right; }
pre {
  overflow-x: auto; margin: 1rem 0; padding: .7rem 1rem; background: var(--head);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.verdict { font-weight: 600; }
figure { margin: 1rem 0; max-width: 46rem; }
.plot { width: 100%; overflow-x: auto; }
.plot svg { display: block; width: 100%; min-width: 34rem; height: auto; }
.plot svg * { stroke-linejoin: round; stroke-linecap: butt; }
.plot text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .8125rem; max-width: 46rem; margin-top: .4rem; }
.v-same { color: var(--same); } .v-faster { color: var(--faster); }
.v-slower { color: var(--slower); } .v-ambiguous { color: var(--ambiguous); }
.v-ineffective { color: var(--ineffective); } .v-invalid { color: var(--invalid); }
.s-same { background: color-mix(in srgb, var(--same) 12%, var(--page)); }
.s-faster-1 { background: color-mix(in srgb, var(--faster) 14%, var(--page)); }
.s-faster-2 { background: color-mix(in srgb, var(--faster) 28%, var(--page)); }
.s-faster-3 { background: color-mix(in srgb, var(--faster) 42%, var(--page)); }
.s-slower-1 { background: color-mix(in srgb, var(--slower) 14%, var(--page)); }
.s-slower-2 { background: color-mix(in srgb, var(--slower) 28%, var(--page)); }
.s-slower-3 { background: color-mix(in srgb, var(--slower) 42%, var(--page)); }
.s-ineffective { background: color-mix(in srgb, var(--ineffective) 14%, var(--page)); }
.s-invalid { background: color-mix(in srgb, var(--invalid) 25%, var(--page)); }
@media print { .scroll { overflow: visible; } body { font-size: 11px; } }
"""
