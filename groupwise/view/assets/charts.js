// Draws the curves and keeps them current. Plotly gets numbers and nothing else: it reads some of
// its texts as markup, so words of a run are written beside the chart, as text.
//
// Plotly is large: until it is there, the server's pictures stand in its place, and can be clicked.
// So it is asked for when all else is on the screen, and read once.
"use strict";

let asked = null;
const frame = () => new Promise(requestAnimationFrame);
const plotly = () => (asked ??= frame().then(frame).then(() => new Promise((ready) => {
  const script = document.createElement("script");
  script.src = "/assets/plotly.js";
  script.addEventListener("load", ready);
  document.head.append(script);
})));

const EVERY = 2000; // milliseconds between two looks at a run
const holder = document.getElementById("charts");
const runs = [holder.dataset.run, holder.dataset.other].filter((url) => url !== undefined);
const charts = [...document.querySelectorAll(".chart")];
const known = runs.map(() => ({ version: "", names: "", data: null }));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");

// Those in open sections, which are the ones that are drawn.
const shown = () => charts.filter((chart) => chart.closest("details").open);

function written(value, share) {
  if (share) return `${Number((100 * value).toPrecision(4))} %`;
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function smooth(values, window) {
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (at >= window ? values[at - window] : 0);
    return sum / Math.min(at + 1, window);
  });
}

function traces(chart, data, number) {
  const curve = data.curves[chart.dataset.name] ?? { step: [], value: [], error: null };
  const line = { color: colour(number ? "--second" : "--accent"), dash: number ? "dash" : "solid", width: 2 };
  const sparse = chart.dataset.name.startsWith("eval/");
  const window = sparse ? 1 : Math.max(1, Math.floor(curve.step.length / 20));
  const base = { x: curve.step, type: "scatter", showlegend: false, hoverinfo: "none" };
  const raw = { ...base, y: curve.value, mode: sparse || curve.step.length === 1 ? "lines+markers" : "lines", line: window > 1 ? { ...line, width: 1, dash: "solid" } : line, opacity: window > 1 ? 0.4 : 1 };
  if (curve.error) raw.error_y = { type: "data", array: curve.error, thickness: 1, color: line.color };
  return window > 1 ? [raw, { ...base, y: smooth(curve.value, window), mode: "lines", line, hoverinfo: "skip" }] : [raw];
}

// Health events are lines through the chart, of two runs in each one's own colour.
function healthLines(data, number) {
  const at = [...new Set(data.events.filter((event) => event.health).map((event) => event.step))];
  const own = runs.length === 1 ? "--bad" : number ? "--second" : "--accent";
  return at.map((step) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: colour(own), width: 1.5, dash: "dot" } }));
}

// Other events are marks at the foot of the chart.
function otherMarks(data) {
  const at = data.events.filter((event) => !event.health).map((event) => event.step);
  return { x: at, y: at.map(() => 0.02), yaxis: "y2", type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip", marker: { symbol: "triangle-up", size: 6, color: colour("--soft"), opacity: 0.6 } };
}

function draw(chart) {
  const ready = known.map((each) => each.data).filter((data) => data !== null);
  if (!ready.length) return;
  const all = ready.flatMap((data, number) => traces(chart, data, number));
  if (runs.length === 1) all.push(otherMarks(ready[0]));
  // 1e-8: a raised exponent would be a style of its own in the text, which the policy stops.
  const axis = { gridcolor: colour("--edge"), zeroline: false, linecolor: colour("--edge"), tickfont: { size: 11 }, exponentformat: "e" };
  const share = chart.dataset.share !== undefined;
  const layout = {
    margin: { l: 48, r: 8, t: 6, b: 26 }, height: 210, autosize: true, hovermode: "x", dragmode: "zoom", uirevision: "kept",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--soft"), family: "system-ui, sans-serif" },
    xaxis: { ...axis, tickformat: ",d", showspikes: true, spikedash: "solid", spikemode: "across" },
    yaxis: { ...axis, automargin: true, tickformat: share ? ".0%" : "", range: share ? [-0.02, 1.04] : undefined, fixedrange: true },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, shapes: ready.flatMap(healthLines),
  };
  const plot = chart.querySelector(".plot");
  const fresh = !plot.data;
  if (fresh) plot.replaceChildren(); // the picture that stood in
  Plotly.react(plot, all, layout, { displayModeBar: false, responsive: true });
  if (fresh) listen(chart, plot);
}

function say(chart, step) {
  const share = chart.dataset.share !== undefined;
  const words = known.map(({ data }) => {
    const curve = data?.curves[chart.dataset.name];
    const at = curve ? curve.step.indexOf(step) : -1;
    return at < 0 ? "–" : written(curve.value[at], share) + (curve.error?.[at] ? ` ± ${written(curve.error[at], share)}` : "");
  });
  const events = known.flatMap(({ data }) => data?.events.filter((event) => event.step === step && (event.health || runs.length === 1)) ?? []);
  const said = events.map((event) => ` · ${event.kind}: ${event.text}`).join("");
  chart.querySelector(".said").textContent = `step ${step}: ${words.join(" and ")}${said}`;
  chart.dataset.step = step;
}

// A click opens the step. Plotly reports it for the nearest point, wherever on the chart it was.
function listen(chart, plot) {
  plot.on("plotly_hover", (event) => say(chart, event.points[0].x));
  plot.on("plotly_click", (event) => open(event.points[0].x));
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
  picture.addEventListener("pointermove", then((step) => say(chart, step)));
  picture.addEventListener("click", then(open));
});

function open(step) {
  if (runs.length === 1 && step > 0) location.assign(`${runs[0]}/step/${step}`);
}

charts.forEach((chart) => chart.addEventListener("keydown", (event) => {
  const curve = known[0].data?.curves[chart.dataset.name];
  if (!curve?.step.length) return;
  const at = curve.step.indexOf(Number(chart.dataset.step ?? -1));
  const to = { ArrowRight: at < 0 ? 0 : at + 1, ArrowLeft: at < 0 ? curve.step.length - 1 : at - 1, Home: 0, End: curve.step.length - 1 }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    const place = Math.min(Math.max(to, 0), curve.step.length - 1);
    say(chart, curve.step[place]);
    if (window.Plotly) Plotly.Fx.hover(chart.querySelector(".plot"), [{ curveNumber: 0, pointNumber: place }]);
  } else if (event.key === "Enter" && chart.dataset.step) open(Number(chart.dataset.step));
}));

function toStep(event, number) {
  const link = document.createElement("a");
  link.href = `${runs[number]}/step/${event.step}`;
  link.textContent = event.step;
  return link;
}

// What the rules found, of two runs in each one's own colour.
function listHealth() {
  const found = known.flatMap(({ data }, number) => data?.events.filter((event) => event.health).map((event) => [event, number]) ?? []);
  const health = document.getElementById("health");
  health.hidden = found.length === 0;
  health.querySelector("ol").replaceChildren(...found.map(([event, number]) => {
    const entry = document.createElement("li");
    if (runs.length > 1) entry.className = number ? "second" : "first";
    entry.append("step ", toStep(event, number), `: ${event.text}`);
    return entry;
  }));
}

function listEvents(data) {
  const body = document.querySelector("#events tbody");
  document.getElementById("no-events").hidden = data.events.length > 0;
  body.replaceChildren(...data.events.toReversed().map((event) => {
    const row = document.createElement("tr");
    row.classList.toggle("health", event.health);
    for (const content of [toStep(event, 0), event.kind, event.text]) row.insertCell().append(content);
    return row;
  }));
}

// True when something changed. What is in view is asked for; nothing, while nothing is new.
async function look(number) {
  const names = [...new Set(shown().map((chart) => chart.dataset.name))];
  const have = known[number];
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
  const data = known[0].data;
  if (runs.length === 1) {
    // A metric that appeared needs a place on the page, which the server makes.
    if (data.metrics > Number(holder.dataset.metrics)) return location.reload();
    document.getElementById("state").textContent = data.state;
    document.getElementById("steps").hidden = data.last === null;
    document.getElementById("last-step").textContent = `last step: ${data.last}`;
    document.getElementById("last-step").href = `${runs[0]}/step/${data.last}`;
    listEvents(data);
  }
  listHealth();
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
  setTimeout(watch, EVERY);
}

document.querySelectorAll("#charts details").forEach((part) => part.addEventListener("toggle", () => part.open && update()));
dark.addEventListener("change", () => plotly().then(drawAll));
watch();
