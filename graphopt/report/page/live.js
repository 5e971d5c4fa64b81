
// Served by `graphopt view`: load the page again when the files of the model have changed.
let shown = null;
setInterval(async () => {
  try {
    const stamp = await (await fetch("/stamp")).text();
    if (shown !== null && stamp !== shown) location.reload();
    shown = stamp;
  } catch { /* the server has ended: the page stays as it is */ }
}, 1000);
