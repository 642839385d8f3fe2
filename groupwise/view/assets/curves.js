// Numbers of a curve made ready to be drawn: where they stand on x, smoothed, as bands over seeds.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = ["solid", "dash", "dot", "dashdot"];
const lineOf = (number) => ({ color: colour(`--run-${number % 8}`), dash: DASHES[number % 4], width: 2 });
const faint = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

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

// The place of the last step that is not behind this one; -1 before the first.
function upTo(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// What a curve has at a step, or had last before it.
function valueAt(curve, step) {
  const place = curve ? upTo(curve.step, step) : -1;
  return place < 0 ? {} : { value: curve.value[place], error: curve.error?.[place], at: curve.step[place] };
}

function meanOf(some) {
  const known = some.filter(({ value }) => value !== undefined);
  if (!known.length) return { arm: some[0].arm };
  return { arm: some[0].arm, value: known.reduce((sum, { value }) => sum + value, 0) / known.length, at: Math.max(...known.map(({ at }) => at)) };
}

// Steps as they stand on x: themselves, or the tokens or seconds that the run had by then.
function placed(steps, data, axis) {
  const of = data.curves[axis];
  if (axis === "step" || !of) return steps;
  return steps.map((step) => of.value[upTo(of.step, step)] ?? 0);
}

const windowOf = (count, choice) => (choice ? Math.max(1, Math.floor(count / choice)) : 1);
const base = (x, steps) => ({ x, customdata: steps, type: "scatter", showlegend: false, hoverinfo: "none" });

function runTraces(name, data, number, choice) {
  const curve = data.curves[name] ?? { step: [], value: [], error: null };
  const line = lineOf(number);
  const sparse = name.startsWith("eval/");
  const window = sparse ? 1 : windowOf(curve.step.length, choice.smoothing);
  const common = base(placed(curve.step, data, choice.axis), curve.step);
  const raw = { ...common, y: curve.value, mode: sparse || curve.step.length === 1 ? "lines+markers" : "lines", line: window > 1 ? { ...line, width: 1, dash: "solid" } : line, opacity: window > 1 ? 0.4 : 1 };
  if (curve.error) raw.error_y = { type: "data", array: curve.error, thickness: 1, color: line.color };
  return window > 1 ? [raw, { ...common, y: smooth(curve.value, window), mode: "lines", line, hoverinfo: "skip" }] : [raw];
}

// The mean of some runs at each step that all of them have, between the lowest and the highest.
function armTraces(name, some, number, choice) {
  const curves = some.map((data) => [data, data.curves[name]]).filter(([, curve]) => curve?.step.length);
  if (!curves.length) return [];
  const at = new Map();
  for (const [data, curve] of curves) {
    const x = placed(curve.step, data, choice.axis);
    curve.step.forEach((step, place) => at.set(step, [...(at.get(step) ?? []), [x[place], curve.value[place]]]));
  }
  const steps = [...at.keys()].filter((step) => at.get(step).length === curves.length).sort((a, b) => a - b);
  const of = (pick) => steps.map((step) => pick(at.get(step)));
  const mean = (place) => (some_) => some_.reduce((sum, each) => sum + each[place], 0) / some_.length;
  const window = name.startsWith("eval/") ? 1 : windowOf(steps.length, choice.smoothing);
  const line = lineOf(number);
  const common = { ...base(of(mean(0)), steps), mode: "lines", line: { width: 0 } };
  const values = (pick) => smooth(of((some_) => pick(...some_.map((each) => each[1]))), window);
  return [
    { ...common, y: values(Math.min), hoverinfo: "skip" },
    { ...common, y: values(Math.max), hoverinfo: "skip", fill: "tonexty", fillcolor: faint(line.color, 0.18) },
    { ...common, y: smooth(of(mean(1)), window), line },
  ];
}

// The healthy range as a band, no higher and no lower than what is drawn: it must not move the axis.
function healthyBand(chart, traces, share) {
  const { low, high } = chart.dataset;
  if (low === undefined && high === undefined) return [];
  let [bottom, top] = share ? [-0.02, 1.04] : [Infinity, -Infinity];
  if (!share) for (const trace of traces) for (const y of trace.y) [bottom, top] = [Math.min(bottom, y), Math.max(top, y)];
  const [y0, y1] = [Math.max(Number(low ?? -Infinity), bottom), Math.min(Number(high ?? Infinity), top)];
  if (!(y0 < y1)) return [];
  return [{ type: "rect", layer: "below", xref: "paper", x0: 0, x1: 1, y0, y1, line: { width: 0 }, fillcolor: faint(colour("--good-fill"), 0.1) }];
}
