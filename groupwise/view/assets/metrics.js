// Which charts are shown, and how: search, constant ones, pins. What was chosen is remembered here
// in the browser, for all runs.
"use strict";

const PINS = "groupwise.pins";
const CHOICE = "groupwise.charts";
const SECTIONS = "groupwise.sections";

function remembered(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // a browser that keeps nothing
  }
}

function remember(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // it holds for this page, then
  }
}

const find = document.getElementById("find-metric");
const fields = { axis: document.getElementById("x-axis"), smoothing: document.getElementById("smoothing"), log: document.getElementById("log-axis"), constant: document.getElementById("constant") };
const pinned = document.getElementById("pinned");
const homes = new Map(charts.map((chart) => [chart, [chart.parentElement, chart.nextElementSibling]]));
const opened = new Set(); // sections that a search opened
const titleOf = (part) => part.querySelector("h2").textContent;

function choose() {
  choice.axis = fields.axis.value;
  choice.smoothing = Number(fields.smoothing.value);
  choice.log = fields.log.checked;
}

function filter() {
  const words = find.value.trim().toLowerCase();
  for (const chart of charts) {
    const text = `${chart.dataset.name} ${chart.querySelector(".about")?.textContent ?? ""} ${chart.getAttribute("aria-label")}`.toLowerCase();
    chart.hidden = words ? !text.includes(words) : chart.dataset.constant !== undefined && !fields.constant.checked && !chart.closest("#pinned");
  }
  for (const part of document.querySelectorAll("#charts details")) {
    const fits = [...part.querySelectorAll(".chart")].filter((chart) => !chart.hidden);
    const all = part.querySelectorAll(".chart").length;
    part.querySelector("summary .soft").textContent = fits.length === all ? all : `${fits.length} of ${all}`;
    if (part === pinned) part.hidden = !all;
    else part.hidden = words !== "" && !fits.length;
    if (words && fits.length && !part.open) {
      part.open = true;
      opened.add(part);
    } else if (!words && opened.delete(part)) part.open = false;
  }
}

// A metric may be on the page twice, as a curve to judge by and in its section: the first is moved.
function place(names) {
  for (const chart of charts) {
    const name = chart.dataset.name;
    const button = chart.querySelector(".pin");
    const first = charts.find((each) => each.dataset.name === name) === chart;
    const up = first && names.includes(name);
    button.setAttribute("aria-pressed", String(names.includes(name)));
    button.textContent = names.includes(name) ? "★" : "☆";
    if (up && !chart.closest("#pinned")) pinned.querySelector(".curves").append(chart);
    const [parent, next] = homes.get(chart);
    if (!up && chart.closest("#pinned")) parent.insertBefore(chart, next?.parentElement === parent ? next : null);
  }
}

if (find) {
  const before = remembered(CHOICE, {});
  if ([...fields.axis.options].some((option) => option.value === before.axis)) fields.axis.value = before.axis;
  if ([...fields.smoothing.options].some((option) => Number(option.value) === before.smoothing)) fields.smoothing.value = String(before.smoothing);
  fields.log.checked = before.log === true;
  fields.constant.checked = before.constant === true;
  choose();
  place(remembered(PINS, []));
  filter();
  const sections = [...document.querySelectorAll("#charts details")].filter((part) => part !== pinned);
  const open = remembered(SECTIONS, {});
  for (const part of sections) {
    part.open = open[titleOf(part)] ?? part.open;
    part.addEventListener("toggle", () => {
      if (!find.value.trim()) remember(SECTIONS, { ...remembered(SECTIONS, {}), [titleOf(part)]: part.open });
    });
  }
  find.addEventListener("input", () => {
    filter();
    update();
  });
  for (const field of Object.values(fields)) {
    field.addEventListener("change", async () => {
      if (field === fields.axis) range = null;
      choose();
      remember(CHOICE, { ...choice, constant: fields.constant.checked });
      filter();
      await update();
      await plotly();
      await drawAll();
    });
  }
  charts.forEach((chart) => chart.querySelector(".pin").addEventListener("click", () => {
    const names = remembered(PINS, []);
    const name = chart.dataset.name;
    const now = names.includes(name) ? names.filter((each) => each !== name) : [...names, name];
    remember(PINS, now);
    place(now);
    filter();
    update();
    chart.querySelector(".pin").focus();
  }));
}
