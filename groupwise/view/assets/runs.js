// The list of runs: sorted by a header, filtered, searched, kept current.
"use strict";

const LOOK = 5000; // milliseconds between two looks
const lines = [...document.querySelectorAll(".runs tbody tr")];
const search = document.getElementById("search");
const only = document.getElementById("only");
let version = "";

function narrow() {
  const words = search.value.trim().toLowerCase();
  for (const row of lines) {
    const kinds = row.dataset.kind.split(" ");
    row.hidden = !((!words || row.textContent.toLowerCase().includes(words)) && (!only.value || kinds.includes(only.value)));
  }
  for (const part of document.querySelectorAll("#runs section")) part.hidden = !part.querySelector("tbody tr:not([hidden])");
  const count = lines.filter((row) => !row.hidden).length;
  document.getElementById("shown").textContent = count === lines.length ? `${count} runs` : `${count} of ${lines.length} runs`;
}

function sortBy(header) {
  const up = header.getAttribute("aria-sort") === "descending";
  const at = header.cellIndex;
  const key = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
  const way = up ? 1 : -1;
  document.querySelectorAll(".runs").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((cell) => cell.removeAttribute("aria-sort"));
    table.tHead.rows[0].cells[at].setAttribute("aria-sort", up ? "ascending" : "descending");
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

async function look() {
  try {
    const answer = document.hidden ? null : await fetch(`/runs.json?known=${version}`);
    if (answer?.status === 200) {
      const found = await answer.json();
      version = found.version;
      const rows = new Map(lines.map((row) => [row.dataset.run, row]));
      const same = found.runs.length === rows.size && found.runs.every((facts) => rows.has(facts.name));
      if (!same) return location.reload(); // a run began, or is gone
      for (const facts of found.runs) fill(rows.get(facts.name), facts);
      narrow();
    }
  } catch {
    // the viewer has ended; what is shown stays
  }
  setTimeout(look, LOOK);
}

const ticked = () => document.querySelectorAll("input[name=run]:checked").length;
document.querySelectorAll(".runs th button").forEach((button) => button.addEventListener("click", () => sortBy(button.closest("th"))));
if (search) {
  search.addEventListener("input", narrow);
  search.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
  only.addEventListener("change", narrow);
  document.addEventListener("change", () => {
    const button = document.getElementById("overlay");
    if (button) button.disabled = ticked() < 2;
  });
  narrow();
}
setTimeout(look, LOOK);
