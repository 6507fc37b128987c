// What the pointer reads off a chart. The charts are drawn without it.
"use strict";
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const box = figure.appendChild(document.createElement("div"));
  box.className = "reading";
  box.hidden = true;

  const nearest = (x) => {
    let low = 0, high = chart.x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (chart.x[middle] < x) low = middle; else high = middle;
    }
    return x - chart.x[low] < chart.x[high] - x ? low : high;
  };
  const word = (value) => (value === null ? "-" : value.toLocaleString("en") + (chart.unit && " " + chart.unit));

  svg.addEventListener("pointermove", (event) => {
    if (!chart.x.length) return;
    const frame = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / frame.width;
    const index = nearest((event.clientX - frame.left) * scale);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, chart.x[index]);
    cursor.setAttribute("y1", chart.top);
    cursor.setAttribute("y2", chart.bottom);
    cursor.style.visibility = "visible";
    const title = document.createElement("b");
    title.textContent = chart.at[index];
    const table = document.createElement("table");
    for (const [colour, name, values] of chart.rows) {
      const row = table.insertRow();
      const label = row.insertCell();
      label.className = colour;
      label.append(document.createElement("i"), name);
      row.insertCell().textContent = word(values[index]);
    }
    box.replaceChildren(title, table);
    box.hidden = false;
    const left = frame.left - figure.getBoundingClientRect().left + chart.x[index] / scale;
    const flip = left + box.offsetWidth + 20 > figure.clientWidth;
    box.style.left = (flip ? Math.max(left - box.offsetWidth - 14, 0) : left + 14) + "px";
    box.style.top = figure.querySelector("figcaption").offsetHeight + 24 + "px";
  });
  svg.addEventListener("pointerleave", () => {
    box.hidden = true;
    cursor.style.visibility = "hidden";
  });

  figure.querySelectorAll(".legend span").forEach((entry) => {
    const lines = svg.querySelectorAll(".line." + entry.className);
    entry.addEventListener("pointerenter", () => {
      figure.classList.add("dim");
      lines.forEach((line) => line.classList.add("lit"));
    });
    entry.addEventListener("pointerleave", () => {
      figure.classList.remove("dim");
      lines.forEach((line) => line.classList.remove("lit"));
    });
  });
}
