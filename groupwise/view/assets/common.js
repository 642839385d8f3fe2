// Keys that work on every page. Letters only count outside of fields.
"use strict";

const rows = () => [...document.querySelectorAll("table.rows tbody tr, .samples .card")].filter((row) => !row.hidden && row.querySelector("a"));

function move(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("now"));
  const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
  all.forEach((row) => row.classList.toggle("now", row === next));
  next.querySelector("a").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) location.assign(link.href);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const actions = {
    j: () => move(1),
    k: () => move(-1),
    "[": () => follow('a[rel="prev"]'),
    "]": () => follow('a[rel="next"]'),
    u: () => follow(document.querySelector("a[data-up]") ? "a[data-up]" : "#up-home"),
    "/": () => document.getElementById("search")?.focus(),
    "?": () => document.getElementById("keys").showModal(),
  };
  if (Object.hasOwn(actions, event.key)) {
    event.preventDefault();
    actions[event.key]();
  }
});

// A row opens where its first link leads; what is selected in it, or is a control, is left alone.
document.addEventListener("click", (event) => {
  const row = event.target.closest("table.rows tbody tr");
  if (!row || event.target.closest("a, button, input, label, summary, pre") || String(getSelection())) return;
  row.querySelector("a")?.click();
});

// Times are kept as those of Greenwich, and shown as those of whoever looks.
function localTimes() {
  for (const each of document.querySelectorAll("time:not([title])")) {
    const at = new Date(each.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    each.title = each.textContent;
    each.textContent = at.toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
  }
}
localTimes();

document.getElementById("keys-button").addEventListener("click", () => document.getElementById("keys").showModal());

document.querySelectorAll("form[role=search] select").forEach((field) => field.addEventListener("change", () => field.form.requestSubmit()));

document.getElementById("to-step")?.addEventListener("submit", (event) => {
  event.preventDefault();
  location.assign(`${event.target.dataset.run}/step/${document.getElementById("step-number").value}`);
});
