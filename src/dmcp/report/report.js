"use strict";
// Titles work without this script; with it they appear at once, and under a finger too.
const hint = document.getElementById("hint");
for (const title of document.querySelectorAll("svg.chart title")) {
  title.parentNode.setAttribute("data-hint", title.textContent);
  title.remove();
}
function show(event) {
  const mark = event.target.closest ? event.target.closest("[data-hint]") : null;
  hint.hidden = !mark;
  if (!mark) return;
  hint.textContent = mark.getAttribute("data-hint");
  const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - hint.offsetWidth - 8);
  hint.style.left = Math.max(left, 8) + window.scrollX + "px";
  hint.style.top = event.clientY + 16 + window.scrollY + "px";
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
