// Draws the curves and keeps them current. Plotly gets numbers and nothing else: it reads some of
// its texts as markup, so words of a run are written beside the chart, as text.
//
// Plotly is large: until it is there, the server's pictures stand in its place, and can be clicked.
// So it is asked for when all else is on the screen, and read once.
"use strict";

let asked = null;
const frame = () => new Promise(requestAnimationFrame);
const plotly = () => (asked ??= frame().then(frame).then(() => window.Plotly ?? new Promise((ready) => {
  const script = document.createElement("script");
  script.src = "/assets/plotly.js";
  script.addEventListener("load", ready);
  document.head.append(script);
})));

const EVERY = 2000; // milliseconds between two looks at a run
const TICKS = { step: ",d", "cost/tokens": "~s", "time/run": ",~g" }; // 12,000 steps, 12k tokens
const SAID = 8; // values under a chart at most
const holder = document.getElementById("charts");
const runs = holder.dataset.runs.split(" ");
// Seeds of one arm have one colour.
const arms = (holder.dataset.arms ?? "0").split(" ").map(Number);
const alone = runs.length === 1;
const charts = [...document.querySelectorAll(".chart")];
const known = runs.map(() => ({ version: "", names: "", data: null }));
const enclosed = document.getElementById("enclosed"); // data of a page that stands alone
const dark = matchMedia("(prefers-color-scheme: dark)");
const choice = { axis: "step", smoothing: 20, log: false };
let range = null; // of x, in all charts
let pointed = null; // the step that is pointed at, in all charts
let linking = false;

// Those in open sections, which are the ones that are drawn.
const shown = () => charts.filter((chart) => !chart.hidden && chart.closest("details").open);
const byArm = () => document.getElementById("by-arm")?.checked ?? false;

// Health events are lines through the chart, of several runs in each one's own colour.
function healthLines(data, number) {
  const at = [...new Set(data.events.filter((event) => event.health).map((event) => event.step))];
  const color = alone ? colour("--bad") : lineOf(arms[number]).color;
  return placed(at, data, choice.axis).map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1.5, dash: "dot" } }));
}

// Other events are marks at the foot of the chart.
function otherMarks(data) {
  const at = data.events.filter((event) => !event.health).map((event) => event.step);
  return { x: placed(at, data, choice.axis), y: at.map(() => 0.02), yaxis: "y2", type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip", marker: { symbol: "triangle-up", size: 6, color: colour("--soft"), opacity: 0.6 } };
}

function tracesOf(chart) {
  const name = chart.dataset.name;
  const ready = known.map(({ data }, number) => [data, number]).filter(([data]) => data !== null);
  if (!byArm()) return ready.flatMap(([data, number]) => runTraces(name, data, arms[number], choice));
  return [...new Set(arms)].flatMap((arm) => armTraces(name, ready.filter(([, number]) => arms[number] === arm).map(([data]) => data), arm, choice));
}

function draw(chart) {
  const ready = known.map((each) => each.data).filter((data) => data !== null);
  if (!ready.length) return;
  const share = chart.dataset.share !== undefined;
  const all = tracesOf(chart);
  const bands = healthyBand(chart, all, share);
  if (alone) all.push(otherMarks(ready[0]));
  // 1e-8: a raised exponent would be a style of its own in the text, which the policy stops.
  const axis = { gridcolor: colour("--edge"), zeroline: false, linecolor: colour("--edge"), tickfont: { size: 11 }, exponentformat: "e" };
  const log = choice.log && !share;
  const layout = {
    margin: { l: 48, r: 8, t: 6, b: 26 }, height: 210, autosize: true, hovermode: "x", dragmode: "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--soft"), family: "system-ui, sans-serif" },
    xaxis: { ...axis, tickformat: TICKS[choice.axis], nticks: 6, ...(range ? { range, autorange: false } : { autorange: true }) },
    yaxis: { ...axis, automargin: true, type: log ? "log" : "linear", tickformat: share ? ".0%" : "", range: share ? [-0.02, 1.04] : undefined, fixedrange: true, nticks: 6 },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: [...(runs.length <= 2 ? ready.flatMap(healthLines) : []), ...(log ? [] : bands)],
  };
  const plot = chart.querySelector(".plot");
  const fresh = !plot.data;
  if (fresh) plot.replaceChildren(); // the picture that stood in
  Plotly.react(plot, all, layout, { displayModeBar: false, responsive: true });
  if (fresh) listen(chart, plot);
  mark(chart);
}

// What each run has at a step, in its own colour; of seeds as bands, the mean of each arm. What
// happened then is told once, under the chart that is looked at.
function say(chart, step, withEvents) {
  const share = chart.dataset.share !== undefined;
  const found = known.map(({ data }, number) => ({ arm: arms[number], ...valueAt(data?.curves[chart.dataset.name], step) }));
  const told = byArm() ? [...new Set(arms)].map((arm) => meanOf(found.filter((each) => each.arm === arm))) : found;
  const values = told.filter(({ value }) => value !== undefined).slice(0, SAID).flatMap(({ arm, value, error, at }, place) => {
    const words = document.createElement("span");
    if (!alone) words.className = `c${arm % 8}`;
    words.textContent = written(value, share) + (error ? ` ± ${written(error, share)}` : "");
    return [place ? ", " : "", words, at === step ? "" : ` (step ${at})`];
  });
  const events = known.flatMap(({ data }) => data?.events.filter((event) => withEvents && event.step === step && (event.health || alone)) ?? []);
  const said = events.map((event) => ` · ${event.kind}: ${event.text}`).join("");
  chart.querySelector(".said").replaceChildren(`step ${step}: `, ...values, said);
}

// While nothing is pointed at, each chart says what it has last.
function sayLast() {
  if (pointed !== null) return;
  for (const chart of shown()) {
    const steps = known.flatMap(({ data }) => data?.curves[chart.dataset.name]?.step.at(-1) ?? []);
    if (steps.length) say(chart, Math.max(...steps), false);
  }
}

function leave() {
  pointed = null;
  document.querySelectorAll(".cross").forEach((cross) => { cross.hidden = true; });
  sayLast();
}

// A line through all charts at the step under the pointer, and each one's value there.
function point(from, step) {
  pointed = step;
  for (const chart of shown()) {
    say(chart, step, chart === from);
    chart.dataset.step = step;
    mark(chart);
  }
}

// The line in one chart, where its x has the step that is pointed at.
function mark(chart) {
  const plot = chart.querySelector(".plot");
  const axis = plot._fullLayout?.xaxis;
  if (!axis || pointed === null) return;
  let cross = plot.querySelector(".cross");
  if (!cross) {
    cross = document.createElement("div");
    cross.className = "cross";
    plot.append(cross);
  }
  const x = axis.d2p(placed([pointed], known.find(({ data }) => data !== null).data, choice.axis)[0]);
  cross.hidden = !(x >= 0 && x <= axis._length);
  if (!cross.hidden) cross.style.left = `${axis._offset + x}px`;
}

// The part of x that is looked at is that of all charts.
function link(from, changed) {
  if (linking) return;
  if (changed["xaxis.range[0]"] !== undefined) range = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
  else if (changed["xaxis.autorange"]) range = null;
  else return;
  linking = true;
  for (const chart of shown()) if (chart !== from && chart.querySelector(".plot").data) draw(chart);
  mark(from);
  linking = false;
}

// A click opens the step. Plotly reports it for the nearest point, wherever on the chart it was.
function listen(chart, plot) {
  plot.on("plotly_hover", (event) => point(chart, event.points[0].customdata));
  plot.on("plotly_click", (event) => open(event.points[0].customdata));
  plot.on("plotly_relayout", (changed) => link(chart, changed));
  plot.addEventListener("pointerleave", leave);
}

// The step that stands under the pointer on a picture of the server's.
function stepAt(chart, picture, event) {
  const { first, last, left, right } = picture.dataset;
  const steps = known[0].data?.curves[chart.dataset.name]?.step;
  if (!steps?.length || first === undefined) return null;
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse()).x;
  const wanted = Number(first) + ((x - left) / (right - left)) * (last - first);
  return steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
}

charts.forEach((chart) => {
  const picture = chart.querySelector(".plot > svg");
  if (!picture) return;
  const then = (action) => (event) => {
    const step = stepAt(chart, picture, event);
    if (step !== null) action(step);
  };
  picture.addEventListener("pointermove", then((step) => point(chart, step)));
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("click", then(open));
});

function open(step) {
  if (alone && !enclosed && step > 0) location.assign(`${runs[0]}/step/${step}`);
}

charts.forEach((chart) => chart.addEventListener("keydown", (event) => {
  const curve = known[0].data?.curves[chart.dataset.name];
  if (!curve?.step.length || event.target !== chart) return;
  const at = curve.step.indexOf(Number(chart.dataset.step ?? -1));
  const to = { ArrowRight: at < 0 ? 0 : at + 1, ArrowLeft: at < 0 ? curve.step.length - 1 : at - 1, Home: 0, End: curve.step.length - 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    const place = Math.min(Math.max(to, 0), curve.step.length - 1);
    point(chart, curve.step[place]);
  } else if (event.key === "Enter" && chart.dataset.step) open(Number(chart.dataset.step));
}));
// Only the chart that is read by keys speaks up.
charts.forEach((chart) => ["focus", "blur"].forEach((kind) => chart.addEventListener(kind, () => {
  chart.querySelector(".said").setAttribute("aria-live", kind === "focus" ? "polite" : "off");
})));

// True when something changed. What is in view is asked for; nothing, while nothing is new.
async function look(number) {
  const have = known[number];
  const names = [...new Set([...shown().map((chart) => chart.dataset.name), ...(choice.axis === "step" ? [] : [choice.axis])])];
  if (enclosed) {
    have.data ??= JSON.parse(enclosed.textContent);
    return true;
  }
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  if (have.names === names.join() && have.version) query.set("known", have.version);
  const answer = await fetch(`${runs[number]}/trends.json?${query}`);
  if (answer.status === 204 || !answer.ok) return false;
  const data = await answer.json();
  known[number] = { version: data.version, names: names.join(), data };
  return true;
}

async function update() {
  const changed = (await Promise.all(runs.map((_, number) => look(number)))).some(Boolean);
  if (!changed) return;
  tell();
  sayLast();
  holder.dataset.ready = ""; // pictures can be clicked
  await plotly();
  await drawAll();
}

// One a frame: the first is seen while the next are being drawn.
async function drawAll() {
  for (const chart of shown()) {
    draw(chart);
    await frame();
  }
}

async function watch() {
  try {
    if (!document.hidden) await update();
  } catch (error) {
    const state = document.getElementById("state");
    if (state) state.textContent = `The viewer does not answer (${error.message}). Is it still running?`;
  }
  if (!enclosed) setTimeout(watch, EVERY);
}

document.querySelectorAll("#charts details").forEach((part) => part.addEventListener("toggle", () => part.open && update()));
document.getElementById("reset-zoom")?.addEventListener("click", () => {
  range = null;
  plotly().then(drawAll);
});
document.getElementById("by-arm")?.addEventListener("change", () => {
  sayLast();
  plotly().then(drawAll);
});
dark.addEventListener("change", () => plotly().then(drawAll));
