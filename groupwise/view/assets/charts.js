// Draws the curves and keeps them current. Plotly gets numbers and nothing else: it reads some of
// its texts as markup, so words of a run are written beside the chart, as text.
"use strict";

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
  const raw = { ...base, y: curve.value, mode: sparse || curve.step.length === 1 ? "lines+markers" : "lines", line: window > 1 ? { ...line, width: 1 } : line, opacity: window > 1 ? 0.4 : 1 };
  if (curve.error) raw.error_y = { type: "data", array: curve.error, thickness: 1, color: line.color };
  return window > 1 ? [raw, { ...base, y: smooth(curve.value, window), mode: "lines", line, hoverinfo: "skip" }] : [raw];
}

// Health events are lines through the chart, others are marks at its foot.
function eventMarks(data) {
  const others = data.events.filter((event) => !event.health);
  const at = [...new Set(data.events.filter((event) => event.health).map((event) => event.step))];
  return {
    trace: { x: others.map((event) => event.step), y: others.map(() => 0.02), yaxis: "y2", type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip", marker: { symbol: "triangle-up", size: 6, color: colour("--soft"), opacity: 0.6 } },
    lines: at.map((step) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: colour("--bad"), width: 1.5, dash: "dot" } })),
  };
}

function draw(chart) {
  const ready = known.map((each) => each.data).filter((data) => data !== null);
  if (!ready.length) return;
  const all = ready.flatMap((data, number) => traces(chart, data, number));
  const marks = ready.length === 1 ? eventMarks(ready[0]) : { trace: null, lines: [] };
  if (marks.trace) all.push(marks.trace);
  const axis = { gridcolor: colour("--edge"), zeroline: false, linecolor: colour("--edge"), tickfont: { size: 11 }, exponentformat: "power" };
  const share = chart.dataset.share !== undefined;
  const layout = {
    margin: { l: 48, r: 8, t: 6, b: 26 }, height: 210, autosize: true, hovermode: "x", dragmode: "zoom", uirevision: "kept",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--soft"), family: "system-ui, sans-serif" },
    xaxis: { ...axis, tickformat: ",d", showspikes: true, spikedash: "solid", spikemode: "across" },
    yaxis: { ...axis, automargin: true, tickformat: share ? ".0%" : "", range: share ? [-0.02, 1.04] : undefined, fixedrange: true },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, shapes: marks.lines,
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
  const events = runs.length === 1 ? known[0].data.events.filter((event) => event.step === step) : [];
  const said = events.map((event) => ` · ${event.kind}: ${event.text}`).join("");
  chart.querySelector(".said").textContent = `step ${step}: ${words.join(" and ")}${said}`;
  chart.dataset.step = step;
}

// A click opens the step. Plotly reports it for the nearest point, wherever on the chart it was.
function listen(chart, plot) {
  plot.on("plotly_hover", (event) => say(chart, event.points[0].x));
  plot.on("plotly_click", (event) => open(event.points[0].x));
}

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
    Plotly.Fx.hover(chart.querySelector(".plot"), [{ curveNumber: 0, pointNumber: place }]);
  } else if (event.key === "Enter" && chart.dataset.step) open(Number(chart.dataset.step));
}));

function toStep(event) {
  const link = document.createElement("a");
  link.href = `${runs[0]}/step/${event.step}`;
  link.textContent = event.step;
  return link;
}

function list(data) {
  const found = data.events.filter((event) => event.health);
  const health = document.getElementById("health");
  health.hidden = found.length === 0;
  health.querySelector("ol").replaceChildren(...found.map((event) => {
    const entry = document.createElement("li");
    entry.append("step ", toStep(event), `: ${event.text}`);
    return entry;
  }));
  const body = document.querySelector("#events tbody");
  document.getElementById("no-events").hidden = data.events.length > 0;
  body.replaceChildren(...data.events.toReversed().map((event) => {
    const row = document.createElement("tr");
    row.classList.toggle("health", event.health);
    for (const content of [toStep(event), event.kind, event.text]) row.insertCell().append(content);
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
    list(data);
  }
  await drawAll();
}

// One a frame: the first is seen while the next are being drawn.
async function drawAll() {
  for (const chart of shown()) {
    draw(chart);
    await new Promise(requestAnimationFrame);
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
dark.addEventListener("change", drawAll);
watch();
