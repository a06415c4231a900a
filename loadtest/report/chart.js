"use strict";
/* Line, bar and point charts in SVG. A chart is a plain object:
   {title, note, x: {label, scale, format, ticks?}, y: {label, scale, format, from0}, series: [{name, color, kind, points}],
    shades: [[x0, x1, text]], marks: [[y, text]]}; a point is [x, y], and y may be null for a gap. */

const Chart = (() => {
  const W = 560, H = 250, LEFT = 62, RIGHT = 14, TOP = 8, BOTTOM = 38;

  const svg = (name, attributes = {}, text = null) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  };
  const html = (name, className = "", text = null) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== null) node.textContent = text;
    return node;
  };

  const niceStep = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  };
  const linearTicks = (low, high, count) => {
    const step = niceStep(high - low || 1, count), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    return ticks;
  };
  const logTicks = (low, high) => {
    if (high / low < 8) return linearTicks(low, high, 5);  // round numbers are too far apart here
    const ticks = [], wide = Math.log10(high / low) > 3;
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of wide ? [1] : [1, 2, 5]) {
        const value = m * 10 ** e;
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
      }
    return ticks;
  };

  /* Where the axis begins and ends, and how a value becomes a place between 0 and 1. */
  const scaled = (axis, values, room, count) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (axis.scale === "log") {
      low = Math.max(low, 1e-9);
      const pad = (high / low) ** 0.06 || 1.2;
      low /= Math.max(pad, 1.05); high *= Math.max(pad, 1.05);
      const span = Math.log(high / low);
      return {low, high, ticks: logTicks(low, high), place: (v) => Math.log(Math.max(v, low) / low) / span};
    }
    if (axis.from0) low = Math.min(0, low);
    if (axis.to) high = Math.max(high, axis.to);
    if (high <= low) high = low + (Math.abs(low) || 1);
    if (room) high += (high - low) * 0.06;
    return {low, high, ticks: axis.ticks || linearTicks(low, high, count), place: (v) => (v - low) / (high - low)};
  };

  const segments = (points) => {
    const parts = [[]];
    for (const point of points) {
      if (point[1] === null || point[1] === undefined) { if (parts.at(-1).length) parts.push([]); }
      else parts.at(-1).push(point);
    }
    return parts.filter((part) => part.length);
  };

  function draw(chart) {
    const box = html("div", "plot");
    box.append(html("h2", "", chart.title), html("p", "", chart.note || ""));
    const legend = html("div", "legend");
    for (const series of chart.series) {
      const entry = html("span"), key = html("i");
      key.style.background = `var(--${series.color})`;
      entry.append(key, series.name);
      legend.append(entry);
    }
    box.append(legend);

    const all = chart.series.flatMap((s) => s.points.filter((p) => p[1] !== null && p[1] !== undefined));
    const root = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": chart.title});
    box.append(root);
    if (!all.length) {
      root.append(svg("text", {x: W / 2, y: H / 2, "text-anchor": "middle"}, "nothing to show"));
      box.dataset.empty = "true";
      return box;
    }
    const xs = scaled(chart.x, all.map((p) => p[0]), false, 8);
    const ys = scaled(chart.y, [...all.map((p) => p[1]), ...(chart.marks || []).map((m) => m[0])], true, 5);
    const px = (v) => LEFT + xs.place(v) * (W - LEFT - RIGHT);
    const py = (v) => H - BOTTOM - ys.place(v) * (H - TOP - BOTTOM);
    axes(root, chart, xs, ys, px, py);
    for (const series of chart.series) plot(root, series, px, py);
    for (const [value, text] of chart.marks || []) {
      root.append(svg("line", {x1: LEFT, x2: W - RIGHT, y1: py(value), y2: py(value), class: "cursor"}));
      root.append(svg("text", {x: W - RIGHT, y: py(value) - 4, "text-anchor": "end"}, text));
    }
    hover(box, root, chart, px, py);
    box.dataset.drawn = "true";
    return box;
  }

  function axes(root, chart, xs, ys, px, py) {
    for (const [from, to, text] of chart.shades || []) {
      const x0 = px(Math.max(from, xs.low)), x1 = px(Math.min(to, xs.high));
      if (x1 <= x0) continue;
      root.append(svg("rect", {x: x0, y: TOP, width: x1 - x0, height: H - TOP - BOTTOM, class: "shade"}));
    }
    for (const tick of ys.ticks) {
      root.append(svg("line", {x1: LEFT, x2: W - RIGHT, y1: py(tick), y2: py(tick), class: "grid"}));
      root.append(svg("text", {x: LEFT - 7, y: py(tick) + 4, "text-anchor": "end"}, chart.y.format(tick)));
    }
    for (const [from, to, text] of chart.shades || [])  // after the grid, which would strike it through
      if (px(Math.min(to, xs.high)) - px(Math.max(from, xs.low)) > 56)
        root.append(svg("text", {x: px(Math.max(from, xs.low)) + 5, y: TOP + 13, class: "over"}, text));
    root.append(svg("line", {x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM, class: "axis"}));
    let last = -Infinity;
    for (const tick of xs.ticks) {
      const text = chart.x.format(tick), half = text.length * 3.2;
      if (px(tick) - half < last + 6) continue;  // labels never overlap
      root.append(svg("text", {x: px(tick), y: H - BOTTOM + 15, "text-anchor": "middle"}, text));
      root.append(svg("line", {x1: px(tick), x2: px(tick), y1: H - BOTTOM, y2: H - BOTTOM + 4, class: "axis"}));
      last = px(tick) + half;
    }
    root.append(svg("text", {x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle"}, chart.x.label));
  }

  function plot(root, series, px, py) {
    const color = `var(--${series.color})`;
    if (series.kind === "bars") {
      for (const [x0, y, x1] of series.points) {
        const width = Math.max(px(x1) - px(x0) - 0.6, 0.8), y0 = py(0);
        root.append(svg("rect", {x: px(x0), y: py(y), width, height: Math.max(y0 - py(y), 0), style: `fill:${color}`}));
      }
      return;
    }
    for (const part of segments(series.points)) {
      const path = part.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(2)},${py(p[1]).toFixed(2)}`).join("");
      const style = `fill:none;stroke:${color};stroke-width:${series.thin ? 1 : 1.8};stroke-linejoin:round`;
      if (part.length > 1) root.append(svg("path", {d: path, style}));
      if (series.kind === "dots" || part.length === 1)
        for (const p of part) root.append(svg("circle", {cx: px(p[0]), cy: py(p[1]), r: 3.5, style: `fill:${color}`}));
    }
  }

  /* The nearest x of each series, in one box beside the cursor. */
  function hover(box, root, chart, px, py) {
    const tip = html("div", "tip");
    tip.hidden = true;
    const cursor = svg("line", {y1: TOP, y2: H - BOTTOM, class: "cursor", visibility: "hidden"});
    root.append(cursor);
    box.append(tip);
    root.addEventListener("pointermove", (event) => {
      const frame = root.getBoundingClientRect(), scale = frame.width / W, at = (event.clientX - frame.left) / scale;
      const rows = [];
      let where = null;
      for (const series of chart.series) {
        const points = series.points.filter((p) => p[1] !== null && p[1] !== undefined);
        if (!points.length) continue;
        const middle = (p) => px(p.length > 2 ? (p[0] + p[2]) / 2 : p[0]);
        const near = points.reduce((a, b) => (Math.abs(middle(b) - at) < Math.abs(middle(a) - at) ? b : a));
        if (where === null) where = near;
        rows.push(`${series.name}: ${chart.y.format(near[1])}`);
      }
      if (where === null) return;
      const x = px(where[0]);
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
      tip.replaceChildren(html("div", "", `${chart.x.tip ? chart.x.tip(where[0]) : chart.x.format(where[0])}`),
        ...rows.map((row) => html("div", "", row)));
      tip.hidden = false;
      const left = root.offsetLeft || 16, width = tip.offsetWidth;
      const wanted = left + x * scale + 12;
      tip.style.left = `${wanted + width > box.clientWidth ? left + x * scale - width - 12 : wanted}px`;
      tip.style.top = `${box.clientHeight - frame.height + 6}px`;
    });
    root.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  }

  return {draw, html};
})();
