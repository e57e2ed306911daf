// Curves with intervals, drawn by uPlot; a click gives the point.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { html } from "view/ui";

const COLOURS = ["#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899", "#84cc16", "#6b7280"];

const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// All series on the steps that any of them has; null where one has none.
const aligned = (series) => {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const spread = (xs, ys) => {
    const by = new Map(xs.map((x, at) => [x, ys[at]]));
    return steps.map((x) => by.get(x) ?? null);
  };
  const columns = [steps];
  for (const one of series) {
    columns.push(spread(one.steps, one.values));
    if (one.low) columns.push(spread(one.steps, one.low), spread(one.steps, one.high));
  }
  return columns;
};

const settings = (series, { width, height, title, range, onPoint, x }) => {
  const text = styleOf("--dim"), grid = styleOf("--line");
  const lines = [], bands = [];
  series.forEach((one, at) => {
    const stroke = COLOURS[at % COLOURS.length];
    const points = { show: one.steps.length < 60, size: 6 };
    lines.push({ label: one.name, stroke, width: 1.6, spanGaps: true, points, value: (_, v) => (v === null ? "–" : Number(v.toPrecision(5)).toString()) });
    if (!one.low) return;
    const thin = { class: "bound", stroke: `${stroke}55`, width: 1, spanGaps: true, points: { show: false } };
    lines.push({ ...thin, label: "low" }, { ...thin, label: "high" });
    bands.push({ series: [lines.length, lines.length - 1], fill: `${stroke}22` });
  });
  const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  return {
    width, height, title, bands,
    scales: { x: { time: false }, y: range ? { range } : {} },
    series: [{ label: x ?? "step" }, ...lines],
    axes: [axis, { ...axis, size: 60, values: (_, splits) => splits.map((v) => Number(v.toPrecision(4)).toString()) }],
    cursor: { points: { size: 8 }, drag: { x: true, y: false } },
    legend: { live: true },
    hooks: {
      ready: [(plot) => {
        let down = 0;
        plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
        plot.over.addEventListener("click", (event) => {
          const at = plot.cursor.idx;
          if (onPoint && at !== null && Math.abs(event.clientX - down) < 4) onPoint(plot.data[0][at]);
        });
      }],
    },
  };
};

export const Chart = ({ series, title, about, height = 190, range, onPoint, x, theme }) => {
  const place = useRef(null);
  const point = useRef(onPoint);
  point.current = onPoint;
  useEffect(() => {
    const around = place.current;
    const fitting = () => Math.max(260, around.clientWidth);
    const width = fitting();
    const chosen = { width, height, range, x, onPoint: onPoint && ((step) => point.current(step)) };
    const plot = new uPlot(settings(series, chosen), aligned(series), around);
    const resized = new ResizeObserver(() => plot.setSize({ width: fitting(), height }));
    resized.observe(around);
    return () => { resized.disconnect(); plot.destroy(); };
  }, [JSON.stringify(series), theme]);
  return html`<figure class=${`chart ${onPoint ? "opens" : ""}`} data-chart=${title}>
    <figcaption title=${about}>${title}</figcaption><div ref=${place}></div></figure>`;
};
