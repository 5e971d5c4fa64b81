
// Edits one by one: the nodes before on the left, those after on the right.
const edits = data.edits.map(([kind, times, where, role, sides, lines, passes]) => ({ kind: word(kind), times, where: word(where), role: word(role),
  sides: sides.map(([shown, more]) => ({ shown: shown.map(([operator, name]) => ({ operator: word(operator), name: word(name) })), more })),
  lines: lines.map(word), passes: passes.map(word) }));
const panel = document.getElementById("edit"), by = document.getElementById("by"), rows = [...document.querySelectorAll("#edits tbody tr")];
const placed = new Map(nodes.map(node => [node.name, node.place]));
let current = 0;

function wanted() { return edits.map((_, number) => number).filter(number => !by?.value || edits[number].passes.includes(by.value)); }
function side(title, { shown, more }, linked) {
  const made = make("div", null, { class: "side" });
  made.append(make("h4", title));
  if (!shown.length) made.append(make("p", "nothing", { class: "note" }));
  for (const { operator, name } of shown) {
    const place = linked ? placed.get(name) : undefined;
    const box = place === undefined ? make("div", null, { class: "chipbox" }) : make("button", null, { type: "button", class: "chipbox", "data-node": place });
    box.append(make("b", short(operator)), make("span", short(name) || "(no name)", { class: "note" }));
    made.append(box);
  }
  if (more) made.append(make("p", `and ${more} more`, { class: "note" }));
  return made;
}
function show(number) {
  const listed = wanted();
  rows.forEach((row, place) => { row.hidden = !listed.includes(place); row.classList.remove("here"); });
  if (!listed.length) return;
  current = listed.includes(number) ? number : listed[0];
  const edit = edits[current];
  document.getElementById("at").textContent = `${listed.indexOf(current) + 1} of ${listed.length}: ${edit.kind}, ${edit.times === 1 ? "once" : edit.times + " times"}, ${edit.role}, ${edit.where === "outside" ? "outside of layers" : "layers " + edit.where}` + (edit.passes.length ? `, by ${edit.passes.join(", ")}` : "");
  const lines = make("ul", null, { class: "lines" });
  edit.lines.forEach(line => lines.append(make("li", line)));
  panel.replaceChildren(side("before", edit.sides[0], false), make("div", "→", { class: "arrow", "aria-hidden": "true" }), side("after", edit.sides[1], true), lines);
  rows[current]?.classList.add("here");
}
if (edits.length && panel) {
  document.getElementById("step").hidden = false;
  document.querySelectorAll("[data-step]").forEach(button => button.addEventListener("click", () => {
    const listed = wanted(), at = listed.indexOf(current) + Number(button.dataset.step);
    show(listed[(at + listed.length) % listed.length]);
  }));
  by?.addEventListener("change", () => show(current));
  rows.forEach((row, number) => { row.tabIndex = 0; row.classList.add("open"); row.addEventListener("click", () => show(number));
    row.addEventListener("keydown", event => { if (event.key === "Enter") show(number); }); });
  show(0);
}
