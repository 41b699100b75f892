"""The HTML report's style sheet: light and dark, and narrow enough for a phone."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fcfcfb; --text: #1c1f23; --soft: #5c6570; --line: #d9dde2; --head: #f1f3f5;
  --callout: #fff6e0; --callout-line: #d99a1b; --band: #e6eaee;
  --same: #2f7d4f; --faster: #1f6fb2; --slower: #b4541a; --ambiguous: #6b7280;
  --ineffective: #8a4bb0; --invalid: #c02634; --reference: #1c1f23;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e4e7ea; --soft: #9aa4af; --line: #343b43; --head: #1e2329;
    --callout: #2c2512; --callout-line: #c9932c; --band: #262c33;
    --same: #6cc48f; --faster: #6db3ec; --slower: #f09a5c; --ambiguous: #a3acb8;
    --ineffective: #c594e6; --invalid: #ff7b86; --reference: #e4e7ea;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 {
  font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line);
}
p, ul { margin: .75rem 0; max-width: 46rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
li { margin: .35rem 0; }
.strong { font-size: 1.08rem; font-weight: 600; }
.callout {
  margin: 1rem 0; padding: .7rem 1rem; max-width: 46rem; background: var(--callout);
  border-left: 4px solid var(--callout-line); border-radius: 0 4px 4px 0;
}
.callout strong { display: block; }
.scroll {
  overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; max-width: 100%;
}
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: left; white-space: nowrap; vertical-align: top; }
th { background: var(--head); font-weight: 600; white-space: normal; vertical-align: bottom; }
tr + tr td { border-top: 1px solid var(--line); }
td.long { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
.number { text-align: right; }
pre {
  overflow-x: auto; margin: 1rem 0; padding: .7rem 1rem; background: var(--head);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
}
.verdict { font-weight: 600; }
.intervals { display: block; margin: 1.5rem 0 .5rem; max-width: 46rem; overflow: visible; }
.intervals text { font-size: .8125rem; fill: var(--text); }
.intervals .value { text-anchor: end; font-variant-numeric: tabular-nums; fill: var(--soft); }
.intervals .scale { text-anchor: middle; fill: var(--soft); font-size: .75rem; }
.intervals .band { fill: var(--band); }
.intervals .one { stroke: var(--soft); stroke-dasharray: 3 3; }
.intervals .tick { stroke: var(--soft); }
.intervals .ci, .intervals .cap { stroke-width: 2; stroke: currentColor; }
.intervals .dot { fill: currentColor; }
figcaption { color: var(--soft); font-size: .8125rem; max-width: 46rem; }
figure { margin: 0; }
.v-same { color: var(--same); } .v-faster { color: var(--faster); }
.v-slower { color: var(--slower); } .v-ambiguous { color: var(--ambiguous); }
.v-ineffective { color: var(--ineffective); } .v-invalid { color: var(--invalid); }
.v-reference { color: var(--reference); }
@media print { .scroll { overflow: visible; } body { font-size: 11px; } }
"""
