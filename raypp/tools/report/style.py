"""The report's style sheet and its script. Colours are those of Okabe and Ito, which differ for
colour-blind readers, too; on dark pages they are lighter."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #5b6570; --line: #e2e6ea;
  --grid: #e9edf0; --a: #0072b2; --b: #d55e00; --eval-a: #009e73; --eval-b: #b05a8c; --good: #00795a; --bad: #b8390e;
  --warn: #8f6500; --forward: #56a4d8; --backward: #e69f00; --weights: #c9b200; --wait: #d5dade;
  --collective: #b884a8; --optimizer: #009e73; --save: #6b5bb5; --data: #9aa5ae; --on: #14181c; }
@media (prefers-color-scheme: dark) { :root { --page: #101418; --card: #181d23; --ink: #e6eaee; --soft: #9aa6b2;
  --line: #2b333c; --grid: #262d35; --a: #56b4e9; --b: #f0874a; --eval-a: #2fc79b; --eval-b: #dd9dc0;
  --good: #3fcf9f; --bad: #ff8a66; --warn: #e6b84c; --forward: #4a9ed6; --backward: #dd9a10; --weights: #c9b63a;
  --wait: #37414b; --collective: #b57fa5; --optimizer: #18a57c; --save: #8d7fd6; --data: #66727d; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 40px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center;
  overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 15px; margin: 18px 0 8px; overflow-wrap: anywhere; }
h4 { font-size: 13px; margin: 0 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px 20px;
  margin-top: 18px; }
.quiet, footer { color: var(--soft); font-size: 13px; }
.url { overflow-wrap: anywhere; margin-top: 4px; }
.note { color: var(--warn); font-size: 13px; overflow-wrap: anywhere; }
.error { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 18px; text-align: center; }
.state { font-size: 12px; font-weight: 650; letter-spacing: .04em; border: 1px solid currentColor; border-radius: 20px;
  padding: 1px 10px; color: var(--warn); }
.state.succeeded, .state.running { color: var(--good); }
.state.failed { color: var(--bad); }
.top { display: grid; gap: 28px; }
.two .top { grid-template-columns: 1fr 1fr; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 10px; margin: 14px 0 0; }
.two .figures { grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 9px 13px; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.two dd { font-size: 16px; }
.key { display: inline-block; width: 16px; height: 4px; border-radius: 2px; background: var(--a);
  vertical-align: middle; margin-right: 6px; flex: none; }
h1 .key { width: 20px; height: 6px; }
.key.b { background: var(--b); } .key.eval { background: var(--eval-a); } .key.b.eval { background: var(--eval-b); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 26px 34px; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; font-size: 14px; min-height: 24px;
  margin: 0 0 6px 50px; }
figcaption small { color: var(--soft); font-size: 12px; margin-left: -6px; }
.legend { color: var(--soft); font-size: 12.5px; display: flex; flex-wrap: wrap; gap: 2px 14px; }
figcaption .legend { margin-left: auto; }
.legend span { overflow-wrap: anywhere; }
output { display: inline-block; font-variant-numeric: tabular-nums; color: var(--ink); margin-left: 6px; }
output:empty { margin: 0; }
.plot { position: relative; height: 190px; margin-left: 50px; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); touch-action: pan-y; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden; display: block; }
.y { position: absolute; right: calc(100% + 7px); transform: translateY(-50%); font-size: 11.5px; color: var(--soft);
  font-variant-numeric: tabular-nums; white-space: nowrap; line-height: 1; }
.x { position: relative; height: 20px; margin-left: 50px; font-size: 11.5px; color: var(--soft); line-height: 1; }
.x span { position: absolute; top: 6px; transform: translateX(-50%); font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.x .end { transform: translateX(-85%); }
.grid { stroke: var(--grid); stroke-width: 1; vector-effect: non-scaling-stroke; }
.begin { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; vector-effect: non-scaling-stroke; }
.curve, .dots { fill: none; stroke: var(--a); stroke-width: 1.7; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; }
.b.curve, .b.dots { stroke: var(--b); }
.eval.curve, .eval.dots { stroke: var(--eval-a); } .b.eval.curve, .b.eval.dots { stroke: var(--eval-b); }
.dots { stroke-width: 7; }
.pale { stroke-width: 1; opacity: .38; }
.mean { fill: none; stroke: var(--a); stroke-width: 2.2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.b.mean { stroke: var(--b); } .eval.mean { stroke: var(--eval-a); } .b.eval.mean { stroke: var(--eval-b); }
.hair { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); display: none;
  pointer-events: none; }
.row { display: grid; grid-template-columns: 92px 1fr; align-items: center; margin: 3px 0; }
.lane { font-size: 12px; color: var(--soft); padding-right: 10px; text-align: right; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }
.strip .track { position: relative; height: 22px; margin: 0 8px; }
.strip .x { margin: 0 8px 0 100px; border-top: 1px solid var(--line); }
.attempt { position: absolute; top: 2px; bottom: 2px; background: var(--a); opacity: .82; color: var(--card);
  font-size: 11.5px; line-height: 18px; text-align: center; border-radius: 3px; overflow: hidden;
  box-shadow: inset -1px 0 0 var(--card); }
.strip.b .attempt { background: var(--b); }
.mark { position: absolute; top: 50%; width: 10px; height: 10px; margin: -5px 0 0 -5px; background: var(--soft);
  border-radius: 50%; }
.marks .mark { position: static; display: inline-block; margin: 0 6px 0 0; vertical-align: -1px; }
.mark.failure { background: var(--bad); border-radius: 0; clip-path: polygon(50% 0, 100% 100%, 0 100%); }
.mark.restart { background: var(--warn); border-radius: 0; clip-path: polygon(50% 0, 100% 50%, 50% 100%, 0 50%); }
.mark.checkpoint { background: var(--good); }
.mark.sample { background: var(--eval-b); border-radius: 1px; }
.mark.notice { background: none; border: 2px solid var(--soft); }
.mesh { display: grid; gap: 8px; width: max-content; min-width: min(100%, calc(var(--columns) * 170px)); }
.line { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(118px, 1fr); align-items: stretch;
  grid-template-columns: none; }
.mesh .line { display: flex; }
.mesh .line > div { flex: 1 1 0; min-width: 124px; max-width: 260px; }
.mesh .line > span { flex: 0 0 56px; }
.stage { display: flex; flex-direction: column; font-size: 13px; padding: 0 2px; }
.stage small, .rank small { color: var(--soft); font-size: 12px; }
.rank { border: 1px solid var(--line); border-left: 5px solid var(--a); border-radius: 8px; padding: 7px 11px;
  display: flex; flex-direction: column; line-height: 1.4; font-size: 13px; background: var(--page); }
.rank.empty { visibility: hidden; }
.rank.bad { background: repeating-linear-gradient(45deg, transparent 0 6px, rgba(213, 94, 0, .13) 6px 12px); }
.node { overflow-wrap: anywhere; }
.node1 { border-left-color: var(--backward); } .node2 { border-left-color: var(--optimizer); }
.node3 { border-left-color: var(--collective); } .node4 { border-left-color: var(--save); }
.node5 { border-left-color: var(--weights); }
.link { position: relative; align-self: center; height: 30px; text-align: center; line-height: 1; }
.link::before { content: ""; position: absolute; left: 5px; right: 9px; top: 50%; border-top: 2px solid var(--soft); }
.link::after { content: ""; position: absolute; right: 5px; top: 50%; width: 7px; height: 7px; margin-top: -2.5px;
  border: solid var(--soft); border-width: 2px 2px 0 0; transform: rotate(45deg); }
.link small { font-size: 10.5px; color: var(--soft); white-space: nowrap; }
.scroll { overflow-x: auto; }
.step { min-width: 0; }
.step .track { position: relative; height: 26px; background: var(--page); border-radius: 3px; overflow: hidden; }
.step .track i { position: absolute; top: 2px; bottom: 2px; font-style: normal; font-size: 11px; line-height: 22px;
  text-align: center; color: var(--on); overflow: hidden; border-radius: 2px; box-shadow: inset -1px 0 0 var(--card); }
.step .row { margin: 2px 0; }
.step .x { margin: 0; }
.step p { margin: 12px 0 4px 92px; }
.step .predicted i { opacity: .62; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.forward { background: var(--forward); } .backward { background: var(--backward); }
.weights { background: var(--weights); } .wait { background: var(--wait); }
.collective { background: var(--collective); } .optimizer { background: var(--optimizer); }
.save { background: var(--save); } .data { background: var(--data); }
.step + .legend, .legend + .scroll { margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12px; padding: 4px 14px 6px 0;
  white-space: nowrap; }
td { border-top: 1px solid var(--line); padding: 6px 14px 6px 0; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 220px; padding-right: 0; }
th:last-child { padding-right: 0; }
th.r, td.r { text-align: right; } td.r:last-child { min-width: 0; }
.kind { font-weight: 600; } .kind.failure { color: var(--bad); } .kind.restart { color: var(--warn); }
.kind.checkpoint { color: var(--good); }
pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; margin: 10px 0 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); font-size: 13px; }
.samples { display: grid; gap: 14px; }
article { border-top: 1px solid var(--line); padding-top: 10px; }
article:first-child { border: 0; padding: 0; }
@media (max-width: 820px) {
  main { padding: 18px 12px 30px; }
  section { padding: 14px 13px 16px; }
  h1 { font-size: 22px; }
  .charts, .two .top { grid-template-columns: 1fr; }
  .figures, .two .figures { grid-template-columns: repeat(auto-fit, minmax(96px, 1fr)); gap: 7px; }
  .figures div { padding: 7px 10px; } dd, .two dd { font-size: 16px; }
  .plot { height: 170px; margin-left: 42px; } .x { margin-left: 42px; } figcaption { margin-left: 42px; }
  .row { grid-template-columns: 78px 1fr; } .lane { font-size: 11.5px; padding-right: 7px; }
  .strip .x { margin-left: 86px; } .step p { margin-left: 78px; }
  .wide .step { min-width: 640px; }
  .events thead { display: none; } .events tr { display: block; border-top: 1px solid var(--line); padding: 7px 0; }
  .events td { display: inline; border: 0; padding: 0 8px 0 0; } .events td.r { display: none; }
  .events td:last-child { display: block; padding: 2px 0 0; min-width: 0; }
}
@media print { body { background: none; } section, figure { break-inside: avoid; } }
"""

SCRIPT = """
const read = path => path.dataset.points.split(" ").map(pair => pair.split(":").map(Number));
const charts = [...document.querySelectorAll("figure.chart")].map(figure => ({
  plot: figure.querySelector(".plot"), hair: figure.querySelector(".hair"),
  low: +figure.dataset.low, high: +figure.dataset.high,
  curves: [...figure.querySelectorAll("path.curve")].map(read), told: [...figure.querySelectorAll("output")],
}));
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle; else high = middle;
  }
  return step - points[low][0] < points[high][0] - step ? points[low] : points[high];
}
function show(share) {
  for (const chart of charts) {
    const step = chart.low + share * (chart.high - chart.low);
    chart.hair.style.display = "block";
    chart.hair.style.left = 100 * share + "%";
    chart.curves.forEach((points, index) => {
      const [at, value] = nearest(points, step);
      chart.told[index].textContent = (+value.toPrecision(5)) + " at " + at.toLocaleString("en");
    });
  }
}
function hide() {
  for (const chart of charts) { chart.hair.style.display = "none"; chart.told.forEach(told => told.textContent = ""); }
}
for (const chart of charts) {
  chart.plot.addEventListener("pointermove", event => {
    const box = chart.plot.getBoundingClientRect();
    show(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  });
  chart.plot.addEventListener("pointerleave", hide);
}
"""
