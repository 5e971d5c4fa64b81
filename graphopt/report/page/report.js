"use strict";
window.addEventListener("error", event => { document.body.dataset.error = event.message; });
// Everything that comes from the model is put into the page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const word = number => data.words[number];
const nodes = data.nodes.map((row, place) => {
  const [name, operator, role, layer, computes, runner, weights, passes, left, reads, operations, bytes, errors, changes, time, fold, slot] = row;
  return { place, name: word(name), operator: word(operator), role: word(role), layer, runner: word(runner), weights, reads, operations, bytes, errors, time, fold, slot,
    computes: computes === null ? null : word(computes), passes: passes.map(word), changes: changes.map(word),
    left: left.map(([by, why]) => ({ by: word(by), why: word(why) })) };
});
const weights = data.weights.map(([name, format, group, shape, parameters, bytes]) => ({ name: word(name), format: word(format), group, shape, parameters, bytes }));
const KEYS = ["op", "role", "format", "layer", "name", "weight", "runner", "computes", "pass", "left"];
const LIMIT = 300;

// The query language of `graphopt inspect`: see graphopt/report/query.py.
function split(text) {
  const terms = [];
  let term = "", quote = "", any = false;
  for (let at = 0; at < text.length; at++) {
    const letter = text[at];
    if (quote) {
      if (letter === quote) quote = "";
      else if (letter === "\\" && quote === '"' && '"\\'.includes(text[at + 1])) term += text[++at];
      else term += letter;
    } else if (letter === "'" || letter === '"') { quote = letter; any = true; }
    else if (letter === "\\") { if (at + 1 >= text.length) throw Error("nothing stands behind the last backslash"); term += text[++at]; any = true; }
    else if (/\s/.test(letter)) { if (any) terms.push(term); term = ""; any = false; }
    else { term += letter; any = true; }
  }
  if (quote) throw Error("a quotation does not end");
  if (any) terms.push(term);
  return terms;
}
function pattern(text) {
  let made = "";
  for (let at = 0; at < text.length; at++) {
    const letter = text[at], end = letter === "[" ? text.indexOf("]", at + (text[at + 1] === "!" ? 3 : 2)) : -1;
    if (letter === "*") made += "[^]*";
    else if (letter === "?") made += "[^]";
    else if (end > 0) {
      const inside = text.slice(at + 1, end).replace(/[\\\]\[^]/g, "\\$&");
      made += "[" + (inside[0] === "!" ? "^" + inside.slice(1) : inside) + "]";
      at = end;
    } else made += letter.replace(/[.*+?^${}()|[\]\\\/-]/g, "\\$&");
  }
  return new RegExp("^" + made + "$", "u");
}
function range(text) {
  const found = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(text);
  if (!found) throw Error(`${JSON.stringify(text)} is not a layer or a range of layers`);
  return [Number(found[1]), Number(found[2] ?? found[1])];
}
function words(node, key) {
  if (key === "op") return [node.operator, node.operator.slice(node.operator.lastIndexOf("::") + (node.operator.includes("::") ? 2 : 1))];
  if (key === "format") return node.weights.map(number => weights[number].format);
  if (key === "weight") return node.weights.map(number => weights[number].name);
  if (key === "left") return node.left.map(each => each.by);
  if (key === "pass") return node.passes;
  return node[key] === null ? [] : [node[key]];
}
function selector(query) {
  const tests = split(query).map(term => {
    const colon = term.indexOf(":");
    if (colon < 0) return node => node.name.includes(term);
    const key = term.slice(0, colon), parts = term.slice(colon + 1).split(",");
    if (!KEYS.includes(key)) throw Error(`there is no key ${key}; the keys are ${KEYS.join(", ")}`);
    if (key === "layer") {
      const ranges = parts.map(range);
      return node => node.layer !== null && ranges.some(([first, last]) => first <= node.layer && node.layer <= last);
    }
    const patterns = parts.map(pattern);
    return node => words(node, key).some(each => patterns.some(one => one.test(each)));
  });
  return node => tests.every(test => test(node));
}

function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const short = name => {
  const line = name.replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "·");
  return line.length > 90 ? line.slice(0, 45) + "…" + line.slice(-44) : line;
};
const amount = value => !value ? "" : value >= 1e9 ? (value / 1e9).toFixed(1) + " G" : value >= 1e6 ? (value / 1e6).toFixed(1) + " M" : value >= 1e3 ? (value / 1e3).toFixed(1) + " k" : String(Math.round(value));
const percent = value => value === null || value === undefined ? "not known" : (100 * value).toFixed(1) + "%";
const stored = node => [...new Set(node.weights.filter(n => weights[n].parameters).map(n => weights[n].format + (weights[n].group ? " by " + weights[n].group : "")))].join(", ");

const field = document.getElementById("query"), count = document.getElementById("count"), list = document.getElementById("list");
const measured = nodes.some(node => node.errors), timed = nodes.some(node => node.time);
const columns = [["name", n => short(n.name), "long"], ["operator", n => short(n.operator)], ["role", n => n.role], ["layer", n => n.layer], ["stored", stored],
  ["run by", n => n.runner, "extra"], ["operations per token", n => amount(n.operations), "n extra"], ["bytes per token", n => amount(n.bytes), "n extra"],
  ...(measured ? [["error alone", n => n.errors ? percent(n.errors[0]) : "", "n"], ["inside", n => n.errors ? percent(n.errors[1]) : "", "n"]] : []),
  ...(timed ? [["time", n => n.time ? percent(n.time) : "", "n"]] : []), ["passes", n => n.passes.join(", ")]];
const head = make("tr");
for (const [title, , side] of columns) head.append(make("th", title, side ? { class: side, scope: "col" } : { scope: "col" }));
list.tHead.append(head);

function search() {
  let found;
  try { found = nodes.filter(selector(field.value)); }
  catch (error) { count.textContent = error.message; return; }
  count.textContent = `${found.length.toLocaleString("en")} of ${nodes.length.toLocaleString("en")} nodes` + (found.length > LIMIT ? `, the first ${LIMIT} are shown` : "");
  count.dataset.found = found.length;
  const rows = found.slice(0, LIMIT).map(node => {
    const row = make("tr", null, { class: "open", tabindex: 0, "data-node": node.place });
    for (const [, value, side] of columns) row.append(make("td", value(node), side ? { class: side } : {}));
    return row;
  });
  list.tBodies[0].replaceChildren(...rows);
  document.dispatchEvent(new CustomEvent("found", { detail: new Set(found.map(node => node.place)) }));
}

// The state of the page is in its address, so that a link leads to a view.
const view = { q: "", node: null, colour: "" };
function remember() {
  const said = Object.entries(view).filter(([, value]) => value !== null && value !== "");
  const hash = said.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
}
async function copy(button) {
  const field = make("input", null, { value: location.href, "aria-label": "link" });
  try { await navigator.clipboard.writeText(location.href); }
  catch {
    // Where a page may not use the clipboard this older way still works.
    button.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const said = button.textContent;
  button.textContent = "copied";
  setTimeout(() => { button.textContent = said; }, 1500);
}

const drawer = document.getElementById("drawer");
let opener = null;
function open(place, push = true) {
  const node = nodes[place];
  if (!node) return;
  const close = make("button", "close", { type: "button", class: "close", "data-close": "" }), link = make("button", "copy link", { type: "button", class: "link", "data-copy": "" }), facts = make("dl");
  const say = (title, ...values) => {
    if (!values.length) return;
    const cell = make("dd");
    values.forEach(value => { cell.append(value instanceof Node ? value : make("div", String(value))); });
    facts.append(make("dt", title), cell);
  };
  const other = number => make("button", short(nodes[number].name || nodes[number].operator), { type: "button", "data-node": number });
  say("operator", node.operator);
  say("role", node.role);
  say("layer", node.layer === null ? "outside of layers" : node.layer);
  say("run by", node.runner);
  if (node.computes !== null) say("computes in", node.computes);
  say("weights", ...node.weights.map(n => `${short(weights[n].name)}: ${weights[n].format}${weights[n].group ? " by " + weights[n].group : ""} [${weights[n].shape.join(", ")}], ${weights[n].bytes.toLocaleString("en")} bytes`));
  if (node.operations || node.bytes) say("per token", `${amount(node.operations)} operations, ${amount(node.bytes)} bytes`);
  if (node.errors) say("errors", `${percent(node.errors[0])} alone, ${percent(node.errors[1])} inside the model`);
  if (node.time) say("time", percent(node.time));
  say("passes", ...(node.passes.length ? [node.passes.join(", ")] : []));
  say("change", ...node.changes);
  say("left", ...node.left.map(each => `${each.by}: ${each.why}`));
  say("reads", ...node.reads.map(other));
  say("read by", ...nodes.filter(each => each.reads.includes(place)).slice(0, 40).map(each => other(each.place)));
  if (drawer.hidden) opener = document.activeElement;
  drawer.replaceChildren(close, link, make("h2", node.name.slice(0, 2000) || "(no name)"), facts);
  drawer.hidden = false;
  drawer.focus();
  document.querySelectorAll(".box.here").forEach(each => each.classList.remove("here"));
  document.querySelector(`.box[data-node="${place}"]`)?.classList.add("here");
  view.node = place;
  if (push) remember();
}
function shut() {
  drawer.hidden = true;
  opener?.focus();
  view.node = null;
  remember();
}
document.addEventListener("click", event => {
  const target = event.target.closest("[data-node]"), copied = event.target.closest("[data-copy]");
  if (copied) copy(copied);
  else if (target) open(Number(target.dataset.node));
  else if (event.target.closest("[data-close]") || (!drawer.hidden && !event.target.closest("#drawer"))) shut();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !drawer.hidden) shut();
  const target = event.target.closest("[data-node]");
  if (target && target.tagName !== "BUTTON" && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); open(Number(target.dataset.node)); }
});
field.addEventListener("input", () => { view.q = field.value; search(); remember(); });
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
