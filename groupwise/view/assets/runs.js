// The list of runs: sorted by a header, filtered, searched, kept current. What was chosen is kept
// for as long as the window is open.
"use strict";

const LOOK = 5000; // milliseconds between two looks
const CHOSEN = "groupwise.runs";
const lines = () => [...document.querySelectorAll(".runs tbody tr")];
const search = document.getElementById("search");
const only = document.getElementById("only");
let sorted = null; // title of a header, and the way
let version = "";

function narrow() {
  const words = search.value.trim().toLowerCase();
  const all = lines();
  for (const row of all) {
    const kinds = row.dataset.kind.split(" ");
    row.hidden = !((!words || row.textContent.toLowerCase().includes(words)) && (!only.value || kinds.includes(only.value)));
  }
  for (const part of document.querySelectorAll("#runs section")) part.hidden = !part.querySelector("tbody tr:not([hidden])");
  const count = all.filter((row) => !row.hidden).length;
  document.getElementById("shown").textContent = count === all.length ? `${count} run${count === 1 ? "" : "s"}` : `${count} of ${all.length} runs`;
}

function sort() {
  if (!sorted) return;
  const way = sorted.up ? 1 : -1;
  document.querySelectorAll(".runs").forEach((table) => {
    const cells = [...table.tHead.rows[0].cells];
    const at = cells.findIndex((cell) => cell.textContent === sorted.title);
    if (at < 0) return;
    const key = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
    cells.forEach((cell) => cell.removeAttribute("aria-sort"));
    cells[at].setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    const numbers = rows.every((row) => !Number.isNaN(Number(key(row))));
    // What has no value comes last, whichever way.
    rows.sort((a, b) => {
      const [one, two] = [key(a), key(b)];
      if (one === "" || two === "") return (one === "") - (two === "");
      return way * (numbers ? Number(one) - Number(two) : one.localeCompare(two, "en", { numeric: true }));
    });
    table.tBodies[0].append(...rows);
  });
}

function keep() {
  try {
    sessionStorage.setItem(CHOSEN, JSON.stringify({ words: search.value, only: only.value, sorted }));
  } catch {
    // a browser that keeps nothing
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(CHOSEN)) ?? {};
    search.value = kept.words ?? "";
    only.value = kept.only ?? "";
    sorted = kept.sorted ?? null;
  } catch {
    // as above
  }
}

function fill(row, facts) {
  for (const name of ["state", "accuracy", "reward", "duration", "badge"]) {
    const cell = row.querySelector(`[data-key=${name}]`);
    if (cell.textContent !== facts[name]) cell.textContent = facts[name];
  }
  row.dataset.kind = `${facts.kind} ${facts.level}`;
  const badge = row.querySelector(".badge");
  badge.className = `badge ${facts.level}`;
  badge.title = facts.verdict;
  row.querySelector("progress").value = facts.share ?? 0;
  row.querySelector(".spark").toggleAttribute("hidden", !facts.spark);
  row.querySelector("polyline").setAttribute("points", facts.spark);
  const values = { accuracy: facts.accuracy_now, reward: facts.reward_now, duration: facts.seconds };
  for (const [name, value] of Object.entries(values)) row.querySelector(`[data-key=${name}]`).closest("td").dataset.value = value ?? "";
  row.querySelector("progress").closest("td").dataset.value = facts.share ?? 0;
}

// A run began, or is gone: its row is made by the server. What is ticked stays so.
async function renew() {
  const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
  const [tables, fresh] = [document, page].map((each) => each.getElementById("tables"));
  if (!tables || !fresh || !document.getElementById("overlay") !== !page.getElementById("overlay")) return location.reload();
  const names = new Set([...ticked()].map((box) => box.value));
  tables.replaceWith(document.adoptNode(fresh));
  for (const box of document.querySelectorAll("input[name=run]")) box.checked = names.has(box.value);
  localTimes();
  sort();
}

async function look() {
  try {
    const answer = document.hidden ? null : await fetch(`/runs.json?known=${version}`);
    if (answer?.status === 200) {
      const found = await answer.json();
      version = found.version;
      const rows = new Map(lines().map((row) => [row.dataset.run, row]));
      const same = found.runs.length === rows.size && found.runs.every((facts) => rows.has(facts.name));
      if (same) found.runs.forEach((facts) => fill(rows.get(facts.name), facts));
      else await renew();
      if (search) narrow();
      enable();
    }
  } catch {
    // the viewer has ended; what is shown stays
  }
  setTimeout(look, LOOK);
}

const ticked = () => document.querySelectorAll("input[name=run]:checked");

function enable() {
  const button = document.getElementById("overlay");
  if (button) button.disabled = ticked().length < 2;
}

document.addEventListener("click", (event) => {
  const header = event.target.closest(".runs th:has(button)");
  if (!header) return;
  sorted = { title: header.textContent, up: header.getAttribute("aria-sort") === "descending" };
  sort();
  keep();
});
document.addEventListener("change", enable);
if (search) {
  for (const field of [search, only]) {
    field.addEventListener("input", () => {
      narrow();
      keep();
    });
  }
  search.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
  restore();
  sort();
  narrow();
  enable();
}
setTimeout(look, LOOK);
