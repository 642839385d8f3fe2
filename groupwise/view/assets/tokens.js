// Tokens of one completion, coloured by a number that is known about each. Text is only ever text.
"use strict";

const section = document.getElementById("tokens");
const heat = document.getElementById("heat");
const choice = document.getElementById("stream");
const note = document.getElementById("token-note");
const fixed = document.getElementById("fixed");
let page = null;
let now = -1;

const shown = (value) => (value === null ? "–" : value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(2) : String(Number(value.toPrecision(4))));

// How far from calm, from -1 (cold) to 1 (hot).
const reachOf = (stream) => (fixed.checked ? stream.fixed : stream.reach);

function warmth(stream, value) {
  const reach = reachOf(stream);
  if (value === null || !reach) return 0;
  if (stream.scale === "low") return -value / reach;
  if (stream.scale === "ratio") return value > 0 ? Math.log(value) / reach : 0;
  return value / reach;
}

function paint() {
  const stream = page.streams.find((each) => each.name === choice.value);
  if (!stream) return;
  [...heat.children].forEach((token, at) => {
    const warm = warmth(stream, stream.values[at]);
    // What somebody else than the policy wrote is grey, and has no numbers.
    token.className = `${token.textContent.trim() ? "" : "empty"} ${page.foreign[at] ? "foreign" : warm > 0 ? "hot" : warm < 0 ? "cold" : ""} ${at === now ? "now" : ""}`;
    token.style.setProperty("--heat", `${Math.round(85 * Math.min(1, Math.abs(warm)))}%`);
  });
  const reach = shown(reachOf(stream));
  const ends = { low: [`−${reach}`, "0"], high: ["0", reach], signed: [`−${reach}`, reach], ratio: [shown(Math.exp(-reachOf(stream))), shown(Math.exp(reachOf(stream)))], flag: ["no", "yes"] }[stream.scale];
  document.getElementById("legend").className = `legend ${stream.scale}`;
  document.getElementById("low").textContent = ends[0];
  document.getElementById("high").textContent = ends[1];
}

function select(at) {
  if (!page.ids.length) return;
  now = Math.min(Math.max(at, 0), page.ids.length - 1);
  [...heat.children].forEach((token, number) => {
    token.classList.toggle("now", number === now);
    token.setAttribute("aria-selected", String(number === now));
  });
  const token = heat.children[now]; // is brought into sight within its box: the page stays where it is
  heat.scrollTop = Math.min(Math.max(heat.scrollTop, token.offsetTop + token.offsetHeight - heat.clientHeight), token.offsetTop);
  heat.setAttribute("aria-activedescendant", heat.children[now].id);
  const facts = [["token", `${page.start + now + 1} of ${page.count}`], ["id", String(page.ids[now])], ["text", JSON.stringify(page.pieces[now])]];
  const turn = page.turns.find((each) => each.start <= page.start + now && page.start + now < each.end);
  if (turn) facts.push(["turn of", turn.role]);
  page.routes[now]?.forEach((chosen, layer) => facts.push([`experts of layer ${layer}`, chosen.join(" ")]));
  for (const stream of page.streams) {
    const value = stream.values[now];
    facts.push([stream.title, stream.scale === "flag" ? (value ? "yes" : "no") : shown(value)]);
  }
  document.getElementById("token").replaceChildren(...facts.map(([name, value]) => {
    const entry = document.createElement("div");
    const title = document.createElement("dt");
    const text = document.createElement("dd");
    title.textContent = name;
    text.textContent = value;
    text.dir = "ltr";
    entry.append(title, text);
    return entry;
  }));
}

function pager() {
  const size = page.ids.length;
  const links = [];
  const button = (words, start) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = words;
    made.addEventListener("click", () => load(start));
    links.push(made);
  };
  if (page.start > 0) button("‹ earlier tokens", Math.max(0, page.start - section.size));
  if (page.start + size < page.count) button("later tokens ›", page.start + size);
  document.getElementById("pager").replaceChildren(...links);
}

async function load(start) {
  const answer = await fetch(`${section.dataset.url}?start=${start}`);
  if (!answer.ok) {
    note.textContent = "The tokens can't be read.";
    return;
  }
  page = await answer.json();
  section.size ??= page.ids.length;
  now = -1;
  const before = choice.value;
  choice.replaceChildren(...page.streams.map((stream, number) => new Option(`${number + 1}. ${stream.title}`, stream.name)));
  if (page.streams.some((stream) => stream.name === before)) choice.value = before;
  heat.replaceChildren(...page.pieces.map((piece, at) => {
    const token = document.createElement("span");
    token.id = `token-${at}`;
    token.setAttribute("role", "option");
    token.textContent = piece.replaceAll("\n", "↵\n") || "·";
    if (!piece.trim()) token.setAttribute("aria-label", JSON.stringify(piece));
    return token;
  }));
  const ends = page.start + page.ids.length;
  const part = page.ids.length < page.count ? `Tokens ${page.start + 1} to ${ends} of ${page.count}. ` : "";
  note.textContent = !page.count ? "The completion has no tokens." : part + (page.named ? "" : "The run has saved no tokenizer yet: tokens are shown by number.");
  note.hidden = !note.textContent;
  pager();
  paint();
  select(0);
}

heat.addEventListener("click", (event) => {
  const at = [...heat.children].indexOf(event.target);
  if (at >= 0) select(at);
});
heat.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  select(now + by);
});
document.addEventListener("keydown", (event) => {
  const stream = page?.streams[Number(event.key) - 1];
  if (!stream || event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  choice.value = stream.name;
  paint();
});
choice.addEventListener("change", paint);
fixed.addEventListener("change", paint);

// A link to the token, and to the number that colours it: #token=17&by=entropy.
document.getElementById("share").addEventListener("click", async () => {
  location.hash = new URLSearchParams({ token: page.start + now + 1, by: choice.value });
  try {
    await navigator.clipboard.writeText(location.href);
    document.getElementById("shared").textContent = "copied";
  } catch {
    document.getElementById("shared").textContent = "it is in the address line";
  }
});

async function followLink() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const wanted = Math.max(0, (Number.parseInt(asked.get("token"), 10) || 1) - 1);
  await load(0);
  if (!page) return;
  if (wanted >= page.ids.length && wanted < page.count) await load(section.size * Math.floor(wanted / section.size));
  if ([...choice.options].some((option) => option.value === asked.get("by"))) choice.value = asked.get("by");
  paint();
  select(wanted - page.start);
  if (asked.has("token")) heat.scrollIntoView({ block: "center" });
}
followLink();
