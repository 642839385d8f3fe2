// What a page of runs tells beside its curves: state, tiles, verdict, events; and notes.
"use strict";

function toStep(event, number) {
  const link = document.createElement(enclosed ? "span" : "a");
  if (!enclosed) link.href = `${runs[number]}/step/${event.step}`;
  link.textContent = event.step;
  return link;
}

// What the rules found, of several runs in each one's own colour.
function listHealth() {
  const found = known.flatMap(({ data }, number) => data?.events.filter((event) => event.health).map((event) => [event, number]) ?? []);
  const health = document.getElementById("health");
  health.hidden = found.length === 0;
  health.querySelector("ol").replaceChildren(...found.map(([event, number]) => {
    const entry = document.createElement("li");
    if (!alone) entry.className = `c${arms[number] % 8}`;
    entry.append("step ", toStep(event, number), `: ${event.text}`);
    return entry;
  }));
}

function listEvents(data) {
  const body = document.querySelector("#events tbody");
  document.getElementById("no-events").hidden = data.told.length > 0;
  document.getElementById("events-table").hidden = !data.told.length;
  body.replaceChildren(...data.told.map((event) => {
    const row = document.createElement("tr");
    row.classList.toggle("health", event.health);
    for (const content of [toStep(event, 0), event.kind, event.times + event.text]) row.insertCell().append(content);
    return row;
  }));
}

// Whoever zoomed, or writes, is not disturbed: the page is made anew later.
const busy = () => range !== null || document.querySelector("#notes[open], dialog[open]") !== null || document.activeElement.matches("input, textarea");

function tell() {
  listHealth();
  if (!alone) return;
  const data = known[0].data;
  // A metric that appeared needs a place on the page, which the server makes.
  if (data.metrics > Number(holder.dataset.metrics) && !enclosed && !busy()) return location.reload();
  document.getElementById("state").textContent = data.state;
  document.getElementById("progress").value = data.share ?? 0;
  document.getElementById("verdict").textContent = data.verdict;
  document.getElementById("verdict").className = `verdict ${data.level}`;
  document.querySelectorAll("#tiles dd > *").forEach((part, at) => {
    const words = data.tiles.flat()[at];
    if (part.textContent !== words) part.textContent = words;
  });
  listEvents(data);
  if (enclosed) return;
  document.getElementById("steps").hidden = data.last === null;
  document.getElementById("last-step").textContent = `last step: ${data.last}`;
  document.getElementById("last-step").href = `${runs[0]}/step/${data.last}`;
}

document.getElementById("notes-form")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const said = document.getElementById("notes-said");
  const tags = form.elements.tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
  const answer = await fetch(form.dataset.url, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Groupwise-Token": form.dataset.token },
    body: JSON.stringify({ tags, note: form.elements.note.value }),
  });
  const found = await answer.json();
  said.textContent = answer.ok ? "Saved." : found.error;
  if (!answer.ok) return;
  document.getElementById("note-text").textContent = found.note;
  document.querySelectorAll("#tags .tag").forEach((tag) => tag.remove());
  document.getElementById("tags").prepend(...found.tags.map((words) => {
    const tag = document.createElement("span");
    tag.className = "tag";
    tag.textContent = words;
    return tag;
  }));
});

watch();
