"use strict";

function draw(chart) {
  // Vega adds a select of its own to some plots.
  const choice = chart.querySelector(".choice select");
  const spec = JSON.parse(chart.querySelector("script").textContent)[choice ? Number(choice.value) : 0];
  if (chart.clientWidth < 560) spec.config.legend.columns = 2;
  const options = { renderer: "svg", actions: false, logLevel: 1, tooltip: { disableDefaultStyle: true } };
  return vegaEmbed(chart.querySelector(".plot"), spec, options).then(() => chart.classList.add("drawn"));
}

const charts = [...document.querySelectorAll(".chart")];
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    seen.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });

for (const chart of charts) {
  seen.observe(chart);
  chart.querySelector(".choice select")?.addEventListener("change", () => draw(chart));
}

addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  charts.filter((chart) => !chart.classList.contains("drawn")).forEach(draw);
});

for (const gallery of document.querySelectorAll(".gallery")) {
  const [range, difference] = gallery.querySelectorAll("input");
  range.addEventListener("input", () => {
    gallery.style.setProperty("--split", `${range.value}%`);
    gallery.querySelectorAll(".split").forEach((pair) => pair.style.removeProperty("--split"));
  });
  difference.addEventListener("change", () => gallery.classList.toggle("difference", difference.checked));
  for (const pair of gallery.querySelectorAll(".split")) {
    pair.addEventListener("pointermove", (event) => {
      const box = pair.getBoundingClientRect();
      pair.style.setProperty("--split", `${(100 * (event.clientX - box.left)) / box.width}%`);
    });
    pair.addEventListener("pointerleave", () => pair.style.removeProperty("--split"));
  }
}

// A reason that names a prompt leads to its pictures, where the page shows them.
for (const study of document.querySelectorAll("main, article")) {
  const prompts = [...study.querySelectorAll(".prompt")].filter((prompt) => prompt.closest("article, main") === study);
  for (const reason of study.querySelectorAll("li, td, p.strong")) {
    if (reason.closest("article, main") !== study) continue;
    for (const text of [...reason.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
      const prompt = prompts.find((one) => text.data.includes(`“${one.querySelector("h3").textContent}”`));
      if (!prompt) continue;
      const named = prompt.querySelector("h3").textContent;
      prompt.id ||= `pictures-${prompts.indexOf(prompt)}-${study.id}`;
      const link = Object.assign(document.createElement("a"), { href: `#${prompt.id}`, textContent: named });
      link.addEventListener("click", () => { const fold = prompt.closest("details"); if (fold) fold.open = true; });
      const after = text.splitText(text.data.indexOf(`“${named}”`) + 1);
      after.splitText(named.length);
      after.replaceWith(link);
    }
  }
}

if (navigator.clipboard) {
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.closest("figure").querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}
