// What a person would see at once: text over text, text that is cut, a page wider than its window.
() => {
  const found = [];
  const name = element => {
    const text = (element.textContent || "").trim().slice(0, 40);
    return `<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ${JSON.stringify(text)}`;
  };
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth) found.push(`the page is ${root.scrollWidth} wide in ${window.innerWidth}`);

  // What scrolls shows a part of itself: only what is inside of that part can be seen.
  const visible = (rect, element) => {
    let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
    for (let each = element; each && each !== document.body; each = each.parentElement) {
      if (!each.matches(".scroll, pre")) continue;
      const box = each.getBoundingClientRect();
      [left, top, right, bottom] = [Math.max(left, box.left), Math.max(top, box.top), Math.min(right, box.right), Math.min(bottom, box.bottom)];
    }
    return right - left > 1 && bottom - top > 1 ? { left, top, right, bottom } : null;
  };
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, title, option, header") || !element.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const seen = visible(rect, element);
      if (seen) boxes.push({ ...seen, element, node });
      for (let each = element; each && each !== document.body; each = each.parentElement) {
        const style = getComputedStyle(each);
        if (!["hidden", "clip"].includes(style.overflowX) || !(each instanceof HTMLElement)) continue;
        const around = each.getBoundingClientRect();
        if (rect.left < around.left - 1 || rect.right > around.right + 1 || rect.bottom > around.bottom + 2) found.push(`cut off: ${name(each)}`);
      }
    }
  }
  boxes.sort((one, other) => one.top - other.top);
  boxes.forEach((one, number) => {
    for (let next = number + 1; next < boxes.length && boxes[next].top < one.bottom - 3; next++) {
      const other = boxes[next];
      if (one.node === other.node) continue;
      const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (across > 2 && down > 3) found.push(`overlapping: ${name(one.element)} and ${name(other.element)}`);
    }
  });
  for (const box of document.querySelectorAll(".box")) {
    if (!box.checkVisibility()) continue;
    const around = box.querySelector("rect").getBoundingClientRect();
    for (const text of box.querySelectorAll("text")) {
      const rect = text.getBoundingClientRect();
      if (rect.left < around.left || rect.right > around.right || rect.bottom > around.bottom + 1) found.push(`too long for its box: ${name(text)}`);
    }
  }
  return [...new Set(found)].slice(0, 20);
}
