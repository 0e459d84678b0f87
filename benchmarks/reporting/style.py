"""The page's style sheet: system fonts, light and dark, wide tables that scroll by themselves, and paper."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --ground: #fff; --panel: #f6f7f9; --ink: #1c2330; --soft: #5b6575; --line: #dde1e7; --accent: #2f6fd0;
  --better: #0e7f5c; --worse: #c0285a; --open: #5b6575; --green: 18,151,111; --red: 214,51,108; --depth: .5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12161d; --panel: #1a2029; --ink: #e4e8ee; --soft: #9aa5b4; --line: #303947; --accent: #7aa9f0;
    --better: #43c79d; --worse: #f2779d; --open: #9aa5b4; --depth: .55;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1280px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .35rem; }
h2 { font-size: 1.25rem; letter-spacing: -.01em; margin: 3rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46em; }
.lead { color: var(--soft); font-size: 1.05rem; }
.note { color: var(--soft); font-size: .87rem; }
a { color: var(--accent); }
nav { margin: 1.1rem 0 0; font-size: .9rem; }
nav a { margin-right: 1.1em; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 1.5rem 0 0; padding: 0; list-style: none; }
.facts li { background: var(--panel); border-radius: 10px; padding: 10px 16px; min-width: 7.5em; }
.facts b { display: block; font-size: 1.35rem; line-height: 1.25; }
.facts span { color: var(--soft); font-size: .85rem; }
.facts .bad b { color: var(--worse); }
.said { list-style: none; padding: 0; margin: .8rem 0 1rem; }
.said .few, .said .none { opacity: .85; }
.said li { border-left: 4px solid var(--open); padding: .15rem 0 .15rem .9rem; margin: 0 0 .8rem; max-width: 60em; }
.said .better { border-color: var(--better); }
.said .worse { border-color: var(--worse); }
.said b { font-weight: 650; }
.badge {
  font-size: .75rem; font-weight: 600; border: 1px solid; border-radius: 99px; padding: .05em .7em; margin-left: .4em;
  color: var(--open); white-space: nowrap;
}
.better .badge { color: var(--better); }
.worse .badge { color: var(--worse); }
.pair { display: flex; flex-wrap: wrap; gap: 28px 36px; align-items: flex-start; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; min-width: 24em; }
caption { text-align: left; font-weight: 600; padding: 0 0 .5rem; }
caption small { font-weight: 400; color: var(--soft); }
th, td { padding: .38rem .55rem; text-align: right; white-space: nowrap; vertical-align: top; }
th { font-weight: 600; }
thead th { border-bottom: 1.5px solid var(--ink); vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
th:first-child, td.text, th.text { text-align: left; }
td.wrap { max-width: 46em; white-space: normal; overflow-wrap: anywhere; min-width: 18em; text-align: left; }
td .sd { color: inherit; opacity: .72; font-size: .9em; }
td small { display: block; opacity: .72; font-size: .8em; line-height: 1.3; }
td.first .mean { font-weight: 700; }
td.second .mean { text-decoration: underline; text-underline-offset: 3px; }
td.mean-of-tasks { border-left: 1px solid var(--line); }
table.dense { font-size: .8rem; }
.dense th, .dense td { padding: .3rem .3rem; }
.scroll th:first-child { position: sticky; left: 0; background: var(--ground); }
.quoted { border-left: 4px solid var(--line); padding-left: 16px; }
.quoted table { color: var(--soft); }
.chip { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .45em; vertical-align: -.05em; }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.4em; font-size: .88rem; margin: .6rem 0 .2rem; }
.shade { display: inline-block; width: 9em; height: .8em; border-radius: 3px; vertical-align: -.05em; margin: 0 .5em; }
figure { margin: .8rem 0 0; max-width: 1120px; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; min-width: 620px; }
figure.narrow { max-width: 780px; }
figcaption { color: var(--soft); font-size: .87rem; max-width: 56em; margin-top: .3rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre {
  background: var(--panel); border-radius: 8px; padding: 12px 16px; overflow-x: auto; font-size: .84rem; line-height: 1.5;
}
footer { margin-top: 3.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
@media print { main { max-width: none; padding: 0; } nav { display: none; } h2, figure, tr { break-inside: avoid; } }
"""
