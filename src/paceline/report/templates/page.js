// Draws the charts and shows a figure's definition while the pointer or the keyboard's focus is on it.
"use strict";
(() => {
  for (const node of document.querySelectorAll("[data-chart]")) {
    drawChart(node, JSON.parse(document.getElementById(node.dataset.chart).textContent));
  }

  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (term) => {
    const [name, text] = document.getElementById(term.getAttribute("aria-describedby")).parentElement.children;
    tip.replaceChildren(Object.assign(document.createElement("strong"), { textContent: name.textContent }), " " + text.textContent);
    tip.hidden = false;
    const at = term.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 12);
    const below = at.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = Math.max(12, left) + "px";
    tip.style.top = (below ? at.bottom + 8 : Math.max(8, at.top - tip.offsetHeight - 8)) + "px";
  };
  for (const term of document.querySelectorAll(".term")) {
    for (const event of ["mouseenter", "focus"]) term.addEventListener(event, () => show(term));
    for (const event of ["mouseleave", "blur"]) term.addEventListener(event, hide);
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true });
  window.addEventListener("beforeprint", () => {
    for (const node of document.querySelectorAll("details")) node.open = true;
  });
})();
