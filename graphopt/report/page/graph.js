
// Boxes of the drawings stand for the same node of all layers of their kind: a colour is of all of them.
const boxes = [...document.querySelectorAll(".box")], chooser = document.getElementById("colour"), legend = document.getElementById("legend");
const instances = new Map();
for (const node of nodes) {
  if (node.fold === null || node.slot === null) continue;
  const key = node.fold + " " + node.slot;
  if (!instances.has(key)) instances.set(key, []);
  instances.get(key).push(node);
}
const alike = box => (box.dataset.same ?? box.dataset.node).split(" ").map(place => nodes[Number(place)])
  .flatMap(node => instances.get(node.fold + " " + node.slot) ?? [node]);
const names = values => [...new Set(values.filter(value => value))].sort().join(", ");
const colours = {
  role: ["what it is for", null],
  stored: ["how its weights are stored", group => names(group.map(stored))],
  runner: ["what runs it", group => names(group.map(node => node.runner))],
  computes: ["what it computes in", group => names(group.map(node => node.computes))],
  pass: ["the last pass that touched it", group => names(group.map(node => node.passes.at(-1)))],
  bytes: ["bytes per token", group => Math.max(...group.map(node => node.bytes ?? 0)), amount],
  operations: ["operations per token", group => Math.max(...group.map(node => node.operations ?? 0)), amount],
  ...(measured ? { alone: ["error alone, worst layer", group => Math.max(...group.map(node => node.errors ? node.errors[0] : 0)), percent],
    inside: ["error inside, worst layer", group => Math.max(...group.map(node => node.errors ? node.errors[1] ?? 0 : 0)), percent] } : {}),
  ...(timed ? { time: ["time, all layers", group => group.reduce((sum, node) => sum + (node.time ?? 0), 0), percent] } : {}),
};
function paint(name) {
  if (!chooser || !colours[name]) return;
  chooser.value = name;
  view.colour = name === "role" ? "" : name;
  const [, value, form] = colours[name], found = boxes.map(box => value ? value(alike(box)) : null);
  const largest = form ? Math.max(...found, 0) : 0, kinds = form || !value ? [] : [...new Set(found.filter(each => each))].sort();
  const hue = kind => (kinds.indexOf(kind) * 360 / Math.max(1, kinds.length) + 210) % 360;
  boxes.forEach((box, number) => {
    const rect = box.querySelector("rect"), each = found[number];
    rect.style.fill = !value || !each ? "" : form ? `color-mix(in srgb, var(--hot) ${Math.round(65 * each / largest)}%, var(--card))` : `light-dark(hsl(${hue(each)} 70% 86%), hsl(${hue(each)} 35% 30%))`;
    box.classList.toggle("plain", Boolean(value) && !each);
  });
  const key = (fill, text) => { const made = make("span", null, { class: "legend" }), swatch = make("i"); swatch.style.background = fill; made.append(swatch, text); return made; };
  legend.replaceChildren(...kinds.map(kind => key(`light-dark(hsl(${hue(kind)} 70% 86%), hsl(${hue(kind)} 35% 30%))`, kind)),
    ...(form && largest ? [key("color-mix(in srgb, var(--hot) 65%, var(--card))", "at most " + form(largest))] : []),
    ...(value && !kinds.length && !largest ? ["nothing is known of the nodes that are drawn"] : []));
}
if (chooser && boxes.length) {
  for (const [name, [title]] of Object.entries(colours)) chooser.append(make("option", title, { value: name }));
  document.getElementById("colours").hidden = false;
  chooser.addEventListener("change", () => { paint(chooser.value); remember(); });
}
document.addEventListener("found", ({ detail }) => boxes.forEach(box => {
  box.classList.toggle("faint", detail.size < nodes.length && !alike(box).some(node => detail.has(node.place)));
}));
