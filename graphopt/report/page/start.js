
// What the address asks for: #q=role:down_proj, #node=12, #colour=stored, joined by &.
function follow() {
  const asked = {};
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.indexOf("=");
    if (at < 0) continue;
    try { asked[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1)); } catch { asked[part.slice(0, at)] = part.slice(at + 1); }
  }
  if (asked.q !== undefined) { field.value = view.q = asked.q; search(); document.getElementById("nodes").scrollIntoView(); }
  if (asked.colour !== undefined) paint(asked.colour);
  if (asked.node !== undefined) open(Number(asked.node), false);
}
window.addEventListener("hashchange", follow);
search();
follow();
document.body.dataset.ready = Math.round(performance.now());
