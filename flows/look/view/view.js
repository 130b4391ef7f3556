/* The list of episodes, its filters, and what the address names: #episode=ID and every filter. */

const data = JSON.parse(document.getElementById("data").textContent);
const [list, rows, reader, form] = ["list", "rows", "reader", "filters"].map((id) => document.getElementById(id));
const ROW = 44, AROUND = 8;

const CRITIC = {
  judged: ["was asked", (one) => one.kinds.size > 0],
  wrong: ["and outcome disagree", (one) => one.kinds.has("yes_lost") || one.kinds.has("no_won")],
  yes_lost: ["said Yes, was lost", (one) => one.kinds.has("yes_lost")],
  no_won: ["said No, was won", (one) => one.kinds.has("no_won")],
};
const FILTERS = [
  ["run", "run", (one) => one.run],
  ["stage", "stage", (one) => one.stage],
  ["outcome", "outcome", (one) => one.result],
  ["split", "split", (one) => one.split],
  ["iteration", "iteration", (one) => String(one.iteration)],
];

const ids = new Map();
for (const one of data.episodes) {
  ids.set(one.id, (ids.get(one.id) || 0) + 1);
  one.kinds = new Set(one.turns.flatMap((turn) => turn.judgements.map((judgement) => judgement.wrong)));
}
const state = { found: data.episodes, shown: null, beside: "", named: "" };

/* What an episode is named in the address; its run, too, where both runs have one of that id. */
const nameOf = (one) => (ids.get(one.id) > 1 ? `${one.id}/${one.run}` : one.id);
const byName = (name) => data.episodes.find((one) => nameOf(one) === name) || data.episodes.find((one) => one.id === name) || null;

function choice(name, label, options) {
  const select = element("select", "");
  select.name = name;
  select.append(new Option("all", ""), ...options.map(([value, text]) => new Option(text, value)));
  return element("label", "", label, select);
}

function makeForm() {
  for (const [name, label, read] of FILTERS) {
    const values = [...new Set(data.episodes.map(read))];
    if (name === "iteration") values.sort((a, b) => a - b);
    if (values.length > 1) form.append(choice(name, label, values.map((value) => [value, value === "-1" ? "-1 (base)" : value])));
  }
  if (data.episodes.some((one) => one.kinds.size))
    form.append(choice("critic", "critic", Object.entries(CRITIC).map(([key, [text]]) => [key, text])));
  for (const [name, type, label] of [["text", "search", "text"], ["tokens", "checkbox", "show tokens"]]) {
    const input = element("input", "");
    Object.assign(input, { name, type });
    form.append(element("label", type === "checkbox" ? "check" : "", label, input));
  }
}

const control = (name) => form.elements.namedItem(name);
const asked = (name) => (control(name) ? control(name).value : "");

function textIn(one) {
  one.words ??= JSON.stringify([one.id, one.scenario, one.opening, one.turns.map((turn) =>
    [turn.text, turn.observation, turn.judgements.map((j) => [j.futures, j.critique, j.refined])])]).toLowerCase();
  return one.words;
}

function filter() {
  const words = JSON.stringify(asked("text").toLowerCase()).slice(1, -1);
  state.found = data.episodes.filter((one) =>
    FILTERS.every(([name, , read]) => !asked(name) || read(one) === asked(name)) &&
    (!asked("critic") || CRITIC[asked("critic")][1](one)) && (!words || textIn(one).includes(words)));
  const count = document.getElementById("count");
  count.textContent = `${state.found.length} of ${data.episodes.length} episodes, ${state.found.filter((one) => one.result === "won").length} of them won`;
  rows.style.height = `${state.found.length * ROW}px`;
}

function rowNode(one, at) {
  const node = element("div", "row", data.runs.length > 1 ? element("b", `${one.run}-ink`, `${one.run} `) : "", `${one.by} `,
    element("span", one.result, one.result), ` ${short(one.reward)} `,
    one.kinds.has("yes_lost") || one.kinds.has("no_won") ? element("span", "tag no", "critic ≠ outcome") : "",
    element("small", "", `${one.scenario} · ${one.split} · ${one.turns.length} turns`));
  node.id = `row-${at}`;
  node.style.top = `${at * ROW}px`;
  const told = { role: "option", "aria-selected": String(one === state.shown), "aria-setsize": state.found.length, "aria-posinset": at + 1 };
  for (const [key, value] of Object.entries(told)) node.setAttribute(key, value);
  node.addEventListener("click", () => { show(one); list.focus({ preventScroll: true }); });
  return node;
}

/* Only the rows in sight are there: a list of thousands scrolls as one of ten. */
function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - AROUND);
  const last = Math.min(state.found.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + AROUND);
  rows.replaceChildren(...state.found.slice(first, last).map((one, i) => rowNode(one, first + i)));
  const at = state.found.indexOf(state.shown);
  if (at >= first && at < last) list.setAttribute("aria-activedescendant", `row-${at}`);
  else list.removeAttribute("aria-activedescendant");
}

const same = (one) => data.episodes.filter((other) => other !== one && other.scenario === one.scenario && other.split === one.split);

/* What stands beside: what was asked for; else of two runs the other one on this scenario, at the same place if it can be. */
function besideOf(one, others) {
  if (state.beside === "none") return null;
  const named = byName(state.beside);
  if (named && others.includes(named)) return named;
  const theirs = others.filter((other) => other.run !== one.run && other.stage === one.stage);
  return theirs.find((other) => other.by === one.by) || theirs[0] || null;
}

function drawReader() {
  const one = state.shown;
  if (!one) {
    const missing = state.named && `Episode ${state.named} is not on this page; it may be with more of them: turnwise view --episodes N.`;
    reader.replaceChildren(element("p", "note", missing || (state.found.length ? "No episode is chosen." : "No episode fits the filter.")));
    return;
  }
  const others = same(one), beside = besideOf(one, others);
  const shown = (episode) => transcript(episode, `#episode=${nameOf(episode)}`, control("tokens").checked, data.wrong, data.runs.length);
  const panes = element("div", beside ? "panes two" : "panes", shown(one), beside ? shown(beside) : null);
  reader.replaceChildren(others.length ? besideChoice(one, others, beside) : "", panes);
}

function besideChoice(one, others, beside) {
  const select = element("select", "");
  const title = (other) => `${data.runs.length > 1 ? `${other.run}: ` : ""}${other.by}, ${other.result}`;
  select.append(new Option("nothing", "none"), ...others.map((other) => new Option(title(other), nameOf(other))));
  select.value = beside ? nameOf(beside) : "none";
  select.addEventListener("change", () => { state.beside = select.value; write(); drawReader(); });
  return element("p", "beside", element("label", "label", "Beside it, on the same scenario: ", select));
}

function show(one) {
  state.shown = one;
  state.beside = state.beside === "none" ? "none" : "";
  write();
  drawReader();
  drawRows();
}

function inSight() {
  const at = state.found.indexOf(state.shown);
  if (at < 0) return;
  if (at * ROW < list.scrollTop) list.scrollTop = at * ROW;
  if ((at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * ROW - list.clientHeight;
}

function move(step) {
  if (!state.found.length) return;
  const at = state.found.indexOf(state.shown);
  show(state.found[at < 0 ? 0 : Math.min(Math.max(at + step, 0), state.found.length - 1)]);
  inSight();
  drawRows();
}

function write() {
  const said = new URLSearchParams();
  for (const input of form.elements) {
    const value = input.type === "checkbox" ? (input.checked ? "1" : "") : input.value;
    if (value) said.set(input.name, value);
  }
  if (state.shown) said.set("episode", nameOf(state.shown));
  if (state.beside) said.set("beside", state.beside);
  history.replaceState(null, "", `#${said}`);
}

/* Take filters and episode from the address. */
function read(event) {
  const said = new URLSearchParams(location.hash.slice(1));
  if (event && !location.hash.includes("=")) return;  // a link to a part of the page
  for (const input of form.elements) {
    const value = said.get(input.name) || "";
    if (input.type === "checkbox") input.checked = value === "1";
    else input.value = value;
    if (input.selectedIndex === -1) input.value = "";
  }
  state.beside = said.get("beside") || "";
  state.named = said.get("episode") || "";
  filter();
  state.shown = state.named ? byName(state.named) : state.found.find((one) => one.kinds.size) || state.found[0] || null;
  drawReader();
  inSight();
  drawRows();
  if (state.named) document.getElementById("browser").scrollIntoView();
}

function refilter() {
  filter();
  if (!state.found.includes(state.shown)) show(state.found[0] || null);
  list.scrollTop = 0;
  inSight();
  write();
  drawReader();
  drawRows();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const inList = event.target === list ? { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity } : {};
  const step = { j: 1, k: -1, ...inList }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  move(step);
}

function drawCurves() {
  const charts = document.getElementById("charts");
  if (!data.curves.length) charts.append(element("p", "note", "No iteration is finished."));
  for (const one of data.curves) {
    const { svg, told } = curve(one, data.runs);
    charts.append(element("figure", "", element("figcaption", "", one.title, element("span", "label", ` ${told}`)), svg));
  }
  if (data.runs.length > 1)
    charts.before(element("p", "legend", element("b", "A-ink", "A, whole line"), "  ", element("b", "B-ink", "B, dashed line")));
}

drawCurves();
makeForm();
form.addEventListener("input", refilter);
form.addEventListener("submit", (event) => event.preventDefault());
list.addEventListener("scroll", drawRows);
document.addEventListener("keydown", pressed);
addEventListener("hashchange", read);
addEventListener("resize", drawRows);
read();
