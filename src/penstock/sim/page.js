"use strict";
// Makes uPlot's options of each figure's description, and draws it. Legends show the values under the pointer.
const HEIGHT = 230;
const TIMES = [[3 * 86400, 86400, "d"], [3 * 3600, 3600, "h"], [300, 60, "min"], [1, 1, "s"], [1e-3, 1e-3, "ms"], [0, 1e-6, "µs"]];
const STEPS = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const short = (value, digits) => Number(value.toPrecision(digits)).toLocaleString("en", {maximumFractionDigits: 9});
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const opaque = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

const seconds = (value) => {
  if (value === 0) return "0 s";
  const [, unit, name] = TIMES.find(([least]) => value >= least);
  return `${short(value / unit, 3)} ${name}`;
};

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart);
  const soft = colour("--soft"), line = colour("--line");
  const isLog = chart.x_axis === "log_time";
  const at = (x) => (chart.x_axis === "plain" ? short(x, 4) : seconds(x));
  const word = (y) => (y == null ? "-" : short(y, 4) + (chart.unit && " " + chart.unit));
  const hasDots = chart.series.some((each) => each.kind === "dots");

  const series = chart.series.map((each) => {
    const stroke = colour(`--c${each.kind === "band" ? 0 : each.colour}`);
    const own = {label: each.name, stroke, width: 1.8, spanGaps: hasDots, points: {show: false}, value: (_, y) => word(y)};
    if (each.kind === "dots") return {...own, width: 0, paths: () => null, points: {show: true, size: 7, fill: stroke}, class: "unnamed"};
    return each.kind === "band" ? {...own, width: 0} : own;
  });
  const bands = [];
  chart.series.forEach((each, index) => {
    if (each.kind === "band" && each.name.endsWith(", to")) {
      bands.push({series: [index + 1, index + 2], fill: opaque(colour("--c0"), each.colour ? 0.3 : 0.16)});
    }
  });

  const mark = (plot) => {
    if (chart.mark_s === null) return;
    const x = plot.valToPos(chart.mark_s, "x", true), {left, top, width, height} = plot.bbox;
    if (x < left || x > left + width) return;
    const pen = plot.ctx;
    pen.save();
    pen.strokeStyle = pen.fillStyle = soft;
    pen.setLineDash([8, 6]);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
    pen.textAlign = x > left + width / 2 ? "right" : "left";
    pen.fillText(` target ${seconds(chart.mark_s)} `, x, top + 12 * devicePixelRatio);
    pen.restore();
  };
  const wide = () => Math.max(figure.clientWidth - 24, 200);
  const plot = new uPlot({
    width: wide(),
    height: HEIGHT,
    padding: [null, 24, null, null],
    scales: {
      x: {
        time: false,
        distr: isLog ? 3 : 1,
        range: isLog ? undefined : (_, low, high) => [0, Math.max(high, chart.x_max, chart.mark_s ?? 0) || 1],
      },
      y: {range: () => [0, 1.05 * chart.y_max || 1]},
    },
    axes: [
      {stroke: soft, grid: {show: false}, ticks: {stroke: line}, ...(chart.x_axis === "time" && {incrs: STEPS}), values: (_, ticks) => ticks.map((x) => (x === null ? "" : at(x)))},
      {stroke: soft, grid: {stroke: line}, ticks: {show: false}, size: 64, values: (_, ticks) => ticks.map((y) => short(y, 4) + (chart.unit === "%" ? "%" : ""))},
    ],
    series: [{label: isLog || chart.x_axis === "time" ? "time" : "at", value: (_, x) => (x == null ? "-" : at(x))}, ...series],
    bands,
    hooks: {draw: [mark]},
  }, [chart.xs, ...chart.series.map((each) => each.ys)], figure);
  new ResizeObserver(() => plot.setSize({width: wide(), height: HEIGHT})).observe(figure);
}
