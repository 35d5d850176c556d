"""Style sheet and scripts of the page of `rewire.report`."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --muted: #626a76; --line: #d9dde3; --page: #fff; --card: #f6f7f9;
  --blue: #2463a8; --red: #c2364b; --grey: #6b7280; --green: #17803d; --green-back: #e7f6ec; --red-back: #fdebed; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #9aa3af; --line: #343a43; --page: #14171b;
  --card: #1d2127; --blue: #74b0f0; --red: #f2808f; --grey: #9aa3af; --green: #7fd79b; --green-back: #15301f;
  --red-back: #3a1b21; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; max-width: 76rem; color: var(--ink);
  background: var(--page); font: 16px/1.55 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; } h2 { margin: 2.6rem 0 .6rem; font-size: 1.25rem; }
h3 { margin: 1.6rem 0 .3rem; font-size: 1rem; overflow-wrap: anywhere; } p { margin: .4rem 0 .8rem; max-width: 46rem; }
.about { color: var(--muted); overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .5rem 0; border-block: 1px solid var(--line); }
a { color: var(--blue); text-decoration: none; } a:hover { text-decoration: underline; }
code, pre { font: .86em/1.5 ui-monospace, Menlo, Consolas, monospace; }
pre { margin: 0; padding: .6rem 0; overflow-x: auto; background: var(--card); border-radius: 6px; }
pre span { display: block; width: max-content; min-width: 100%; padding: 0 .9rem; white-space: pre; }
.added { color: var(--green); background: var(--green-back); }
.removed { color: var(--red); background: var(--red-back); }
.hunk { color: var(--muted); }
summary { cursor: pointer; padding: .35rem 0; color: var(--muted); overflow-wrap: anywhere; }
summary code { word-break: break-all; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.1rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--muted); white-space: nowrap; }
.wide { overflow-x: auto; margin: .4rem 0; }
svg { display: block; } svg text { fill: var(--muted); text-anchor: middle; font-family: system-ui, sans-serif; }
.stream { display: flex; flex-wrap: wrap; max-height: 44rem; overflow: auto; }
.stream text { font-size: 10.5px; } .branch text { fill: var(--ink); }
.shortcut { stroke: var(--ink); stroke-width: 2.2; fill: none; }
.way { stroke: var(--grey); stroke-width: 1.2; fill: none; } .band { fill: var(--line); }
.branch rect { fill: var(--card); stroke: var(--grey); } .branch[data-kind*="attention"] rect { stroke: var(--blue); }
.branch[data-kind="ffn"] rect { stroke: var(--red); }
.state { fill: var(--ink); } .add circle { fill: var(--page); stroke: var(--ink); stroke-width: 1.6; }
.add path { stroke: var(--ink); stroke-width: 1.6; }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem 2rem; align-items: end; } .pictures .wide { max-width: 100%; }
rect.positive { fill: var(--blue); } rect.negative { fill: var(--red); } svg.heatmap rect { stroke: var(--line); }
svg.heatmap rect { stroke-width: .5; } svg.depth text, svg.heatmap text { font-size: 11px; }
.edge { fill: none; } .edge.previous { stroke: var(--grey); } .edge.longer { stroke: var(--blue); }
.edge.negative { stroke: var(--red); } svg.heatmap rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.edge:hover { stroke-opacity: 1; } .read { fill: var(--muted); }
.unit { fill: var(--card); stroke: var(--grey); } .unit[data-kind*="attention"] { stroke: var(--blue); }
.unit[data-kind="ffn"] { stroke: var(--red); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; color: var(--muted); }
.legend span::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border-radius: 2px; vertical-align: -.05em; background: var(--blue); }
.legend .negative::before { background: var(--red); }
.legend .previous::before, .legend .longer::before { height: .2em; vertical-align: .25em; }
.legend .previous::before { background: var(--grey); }
#tip { position: fixed; z-index: 1; max-width: 22rem; padding: .25rem .6rem; border-radius: 4px; font-size: .85rem;
  color: var(--page); background: var(--ink); pointer-events: none; overflow-wrap: anywhere; }
"""

SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const at = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !at;
  if (at) tip.textContent = at.dataset.tip;
});
document.addEventListener("pointermove", (event) => {
  if (tip.hidden) return;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
});
"""
