// Tells htmx to ask again when a followed job has something new: at most once a second.
"use strict";
(function () {
  const page = document.querySelector("[data-follow]");
  if (!page || !window.EventSource) return;
  let waiting = false;
  const refresh = function () {
    if (waiting) return;
    waiting = true;
    setTimeout(function () {
      waiting = false;
      htmx.trigger(page, "told");
    }, 1000);
  };
  const source = new EventSource(page.dataset.follow);
  for (const name of ["progress", "state", "step", "epoch", "restart", "warning", "log"]) {
    source.addEventListener(name, refresh);
  }
  source.addEventListener("end", function () {
    source.close();
    refresh();
  });
})();
