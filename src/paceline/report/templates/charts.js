// Draws a figure of `paceline.report.charts` as SVG. The legend hides traces, the pointer shows hints, a drag zooms along x.
// A node that is drawn again shows the new figure, with the same traces hidden and the same zoom.
"use strict";
const drawChart = (() => {
  const DASHES = { dash: "7 5", dot: "2 4", dashdot: "8 4 2 4" };
  const TURN = { above: [-7, -9, "end"], below: [7, 17, "start"], left: [-7, 15, "end"], right: [9, 4, "start"] };

  const svg = (name, attributes = {}, ...inside) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== "") made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };
  const html = (name, className, ...inside) => {
    const made = Object.assign(document.createElement(name), { className });
    made.append(...inside);
    return made;
  };
  const at = (values, i) => (Array.isArray(values) ? values[i] : values);
  const shown = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
  const pen = document.createElement("canvas").getContext("2d");
  const wide = (text) => Math.max(...text.split("\n").map((line) => pen.measureText(line).width));

  // Values of a trace along an axis.
  const along = (trace, axis) => {
    if (trace.kind === "bars" && axis === "y") return trace.y.flatMap((y) => [y - 0.5, y + 0.5]);
    if (trace.kind === "bars") return [...trace.ends.flat(), ...(trace.high || [])];
    const intervals = axis === "y" ? [...(trace.low || []), ...(trace.high || [])] : [];
    return [...(axis === "y" ? trace.tops || trace.y : trace.x), ...intervals];
  };

  // Ends of an axis.
  const span = (axis, name, traces, more) => {
    if (axis.span) return axis.span;
    const values = [...traces.flatMap((trace) => along(trace, name)), ...more].filter((v) => v !== null && (!axis.log || v > 0));
    if (!values.length) return axis.log ? [1, 10] : [0, 1];
    let [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    if (axis.log) {
      const room = Math.max(1.08, (high / low) ** 0.05);
      return [low / room, high * room];
    }
    if (axis.from_zero) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    const tight = name === "x" && traces.every((trace) => trace.kind === "points" && !trace.marks);
    return [axis.from_zero && low === 0 ? 0 : low - (tight && high > low ? 0 : room), high + (tight && high > low ? 0 : room)];
  };

  const scale = (axis, [low, high], from, to) => {
    const t = axis.log ? Math.log10 : (v) => v;
    const turn = (v) => from + ((t(v) - t(low)) / (t(high) - t(low))) * (to - from);
    turn.back = (px) => {
      const value = t(low) + ((px - from) / (to - from)) * (t(high) - t(low));
      return axis.log ? 10 ** value : value;
    };
    return turn;
  };

  // Ticks with their labels: those of the axis, or round numbers.
  const ticks = (axis, [first, last], count) => {
    const [low, high] = [Math.min(first, last), Math.max(first, last)];
    const inside = (v) => v >= low - 1e-9 * Math.abs(low) && v <= high + 1e-9 * Math.abs(high);
    if (axis.ticks) return axis.ticks.filter(([v]) => inside(v));
    if (axis.log && high / low > 5) {
      const powers = Array.from({ length: 60 }, (_, i) => i - 30), most = Math.max(count, 3);
      const sets = [[1, 2, 5], [1]].map((digits) => powers.flatMap((p) => digits.map((d) => d * 10 ** p)).filter(inside));
      const found = sets.find((set) => set.length <= 1.2 * most) || sets[1], every = Math.ceil(found.length / (1.2 * most));
      return found.filter((_, i) => i % every === 0).map((v) => [v, shown(v)]);
    }
    const rough = (high - low) / Math.max(count, 2), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push([i * step, shown(i * step + 0)]);
    return found;
  };

  const symbol = (kind, x, y, size, colour) => {
    const r = size / 2, fill = kind === "ring" ? "none" : colour;
    const style = { class: "point", fill, stroke: colour, "stroke-width": 1.5 };
    const path = (...points) => svg("path", { ...style, d: `M${points.map(([a, b]) => `${x + r * a} ${y + r * b}`).join("L")}Z` });
    switch (kind) {
      case "square": return path([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]);
      case "diamond": return path([0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]);
      case "triangle": return path([0, -1.1], [1.1, 0.9], [-1.1, 0.9]);
      case "cross": return svg("path", { ...style, d: `M${x - r} ${y - r}l${size} ${size}m0 ${-size}l${-size} ${size}`, "stroke-width": 2 });
      case "tick": return svg("path", { ...style, d: `M${x} ${y - r}v${size}`, "stroke-width": 3 });
      case "star": return path(...Array.from({ length: 10 }, (_, i) => [0, 1].map((turn) =>
        (i % 2 ? 0.45 : 1.1) * (turn ? -Math.cos((i * Math.PI) / 5) : Math.sin((i * Math.PI) / 5)))));
      default: return svg("circle", { ...style, cx: x, cy: y, r });
    }
  };

  // Ends of bars and tops of stacked areas, which depend on the previous traces.
  const placed = (figure, traces) => {
    const sums = new Map(), tops = [];
    return traces.map((trace) => {
      if (trace.kind === "bars") {
        const ends = trace.x.map((length, i) => {
          const start = trace.starts ? trace.starts[i] : figure.stacked ? sums.get(trace.y[i]) || 0 : 0;
          if (figure.stacked) sums.set(trace.y[i], start + (length || 0));
          return [start, start + (length || 0)];
        });
        return { ...trace, ends };
      }
      if (trace.fill !== "stack") return trace;
      const floor = trace.y.map((_, i) => tops[i] || 0);
      trace.y.forEach((y, i) => { tops[i] = floor[i] + (y || 0); });
      return { ...trace, floor, tops: tops.slice(0, trace.y.length) };
    });
  };

  const lineOf = (xs, ys, steps) => {
    let path = "", open = false;
    xs.forEach((x, i) => {
      if (ys[i] === null || !Number.isFinite(ys[i])) { open = false; return; }
      const to = `${x.toFixed(1)} ${ys[i].toFixed(1)}`;
      path += !open ? `M${to}` : steps ? `H${x.toFixed(1)}V${ys[i].toFixed(1)}` : `L${to}`;
      open = true;
    });
    return path;
  };

  // Draw one set of axes with its traces; returns the data for the pointer.
  const draw = (root, figure, traces, width, height, zoom) => {
    const X = figure.x || {}, Y = figure.y || {}, panel = Array.isArray(X.ticks) && !X.ticks.length && X.title && !figure.stacked;
    const size = width < 480 ? 11 : 13;
    pen.font = `${size}px system-ui, sans-serif`;
    const drawn = placed(figure, traces);
    const rules = figure.rules || [], notes = figure.notes || [];
    const spanX = zoom || span(X, "x", drawn, rules.map((rule) => rule.x)), spanY = span(Y, "y", drawn, []);
    const top = panel ? 32 : 8, bottom = height - (panel ? 4 : (X.title ? 24 : 0) + 22);
    const ticksY = ticks(Y, spanY, (bottom - top) / 45);
    const label = ticksY.length ? Math.max(...ticksY.map(([, text]) => wide(text))) : 0;
    const left = Math.min(width / 2, label + (Y.title ? 22 : 0) + 10), right = width - 14;
    const x = scale(X, spanX, left, right), y = scale(Y, spanY, bottom, top);
    const clip = `clip-${root.parentNode.id}-${root.parentNode.querySelectorAll("svg").length}`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 })));
    const grid = svg("g"), names = svg("g", { class: "ticks" }), inside = svg("g", { "clip-path": `url(#${clip})` }), over = svg("g");
    root.append(grid, inside, over, names);

    let free = -Infinity;
    for (const [value, text] of ticks(X, spanX, (right - left) / 90)) {
      const px = x(value), half = wide(text) / 2;
      if (X.grid !== false) grid.append(svg("path", { class: "grid", d: `M${px} ${top}V${bottom}` }));
      if (px - half < free) continue;
      free = px + half + 8;
      names.append(svg("text", { class: "xtick", x: px, y: bottom + 17, "text-anchor": "middle" }, text));
    }
    for (const [value, text] of ticksY) {
      if (Y.grid !== false) grid.append(svg("path", { class: "grid", d: `M${left} ${y(value)}H${right}` }));
      const lines = text.split("\n");
      lines.forEach((line, i) => names.append(svg("text", { class: "ytick", x: left - 7, "text-anchor": "end",
        y: y(value) + 4 + (i - (lines.length - 1) / 2) * (size + 3) }, line)));
    }
    if (!panel) grid.append(svg("path", { class: "axis", d: `M${left} ${bottom}H${right}` }));
    if (panel) names.append(svg("text", { class: "bold", x: 0, y: 22 }, X.title));
    else if (X.title) names.append(svg("text", { class: "xtitle", x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, X.title));
    if (Y.title) names.append(svg("text", { class: "ytitle", "text-anchor": "middle",
      transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)` }, Y.title));

    const points = [], bars = [];
    for (const trace of drawn) {
      const own = svg("g", { class: `trace ${trace.kind}` }), words = svg("g");
      inside.append(own);
      over.append(words);
      const interval = (i, across, along_) => {
        if (!trace.low || trace.low[i] >= trace.high[i]) return;
        const low = along_(trace.low[i]), high = along_(trace.high[i]), t = trace.kind === "bars";
        const d = t ? `M${low} ${across}H${high}M${low} ${across - 4}v8M${high} ${across - 4}v8` : `M${across} ${low}V${high}M${across - 4} ${low}h8M${across - 4} ${high}h8`;
        own.append(svg("path", { class: "interval", d, fill: "none", stroke: t ? "currentColor" : trace.colour, "stroke-width": 1.5 }));
      };
      if (trace.kind === "bars") {
        const step = Math.abs(y(1) - y(0));
        trace.ends.forEach(([start, end], i) => {
          if (trace.x[i] === null) return;
          const thick = Math.min((trace.thick || 0.72) * step, 26), mid = y(trace.y[i]), x0 = x(start), x1 = x(end);
          own.append(svg("rect", { class: "point", x: x0, y: mid - thick / 2, width: Math.max(x1 - x0, 0), height: thick,
            fill: at(trace.colour, i), opacity: trace.opacity ? trace.opacity[i] : undefined,
            stroke: trace.edge ? "rgba(255,255,255,.65)" : undefined, "stroke-width": trace.edge }));
          interval(i, mid, x);
          if (trace.words) words.append(svg("text", { class: "word", x: x1 + 6, y: mid + 4 }, trace.words[i]));
          bars.push({ x0, x1, y0: mid - thick / 2, y1: mid + thick / 2,
            text: trace.hints ? trace.hints[i] : `${trace.name} ${shown(trace.x[i])}` });
        });
        continue;
      }
      const xs = trace.x.map(x), ys = (trace.tops || trace.y).map((v) => (v === null || (Y.log && v <= 0) ? null : y(v)));
      if (trace.fill === "stack") {
        const floor = trace.floor.map(y), back = xs.map((_, i) => xs.length - 1 - i);
        const outline = lineOf([...xs, ...back.map((i) => xs[i])], [...ys, ...back.map((i) => floor[i])]);
        if (outline) own.append(svg("path", { d: `${outline}Z`, fill: trace.colour }));
      } else if (trace.fill === "area") own.append(svg("path", { d: `${lineOf(xs, ys)}Z`, fill: trace.colour }));
      const stroke = trace.width === undefined ? 2 : trace.width;
      if (stroke) own.append(svg("path", { d: lineOf(xs, ys, trace.steps), fill: "none", stroke: trace.colour, "stroke-width": stroke,
        "stroke-dasharray": DASHES[trace.dash], "stroke-linejoin": "round" }));
      xs.forEach((px, i) => {
        if (ys[i] === null) return;
        interval(i, px, y);
        const mark = at(trace.marks, i), kind = at(trace.symbol, i) || "circle";
        if (mark) own.append(symbol(kind, px, ys[i], mark, trace.mark_colours ? trace.mark_colours[i] : trace.colour));
        const [dx, dy, anchor] = TURN[trace.side || "right"];
        if (trace.words && trace.words[i]) words.append(svg("text", { class: "word", x: px + dx, y: ys[i] + dy, "text-anchor": anchor }, trace.words[i]));
        if (trace.hints && !trace.hints.length) return;
        points.push({ px, py: ys[i], x: trace.x[i], trace, i,
          text: trace.hints ? trace.hints[i] : `${trace.name}\n${X.title || "x"} ${shown(trace.x[i])}\n${Y.title || "y"} ${shown(trace.y[i])}` });
      });
    }
    for (const note of notes) over.append(svg("text", { class: note.bold ? "note bold" : "note", x: note.inside ? left : 0, y: y(note.y) + 4 }, note.text));
    for (const rule of rules) {
      const px = x(rule.x);
      if (px < left - 1 || px > right + 1) continue;
      over.append(svg("path", { class: "rule", d: `M${px} ${top}V${bottom}`, stroke: rule.colour, "stroke-width": 1.5, "stroke-dasharray": DASHES[rule.dash || "dash"] }));
      over.append(svg("text", { class: "note", "text-anchor": "end", transform: `translate(${px > left + 20 ? px - 5 : px + 13} ${top + 2}) rotate(-90)` }, rule.text));
    }
    return { points, bars, x, left, right, top, bottom, unified: figure.unified, title: X.title };
  };

  // Hint text for the pointer at a place of a chart, or nothing.
  const hintAt = ({ points, bars, unified, left, right, title }, px, py) => {
    if (px < left - 8 || px > right + 8) return "";
    const bar = bars.find((one) => px >= one.x0 - 1 && px <= one.x1 + 1 && py >= one.y0 && py <= one.y1);
    if (!points.length || (bar && !unified)) return bar ? bar.text : "";
    if (unified) {
      const nearest = points.reduce((a, b) => (Math.abs(b.px - px) < Math.abs(a.px - px) ? b : a));
      const those = points.filter((one) => one.x === nearest.x);
      return [`${title} ${shown(nearest.x)}`, ...those.map((one) => `${one.trace.name} ${shown(one.trace.y[one.i])}`)].join("\n");
    }
    const far = (one) => Math.hypot(one.px - px, one.py - py);
    const nearest = points.reduce((a, b) => (far(b) < far(a) ? b : a));
    return far(nearest) < 40 ? nearest.text : "";
  };

  return (node, figure) => {
    if (node.redraw) return node.redraw(figure);
    const hidden = new Set();
    let zoom = null;
    const hint = html("div", "hint");
    const legend = () => {
      const made = html("div", "legend");
      (figure.traces || []).forEach((trace, i) => {
        if (trace.in_legend === false) return;
        const key = svg("svg", { width: 22, height: 10 }), colour = at(trace.colour, 0);
        if (trace.fill || trace.kind === "bars") key.append(svg("rect", { width: 22, height: 10, fill: colour }));
        else if (trace.width !== 0) key.append(svg("path", { d: "M0 5H22", stroke: colour, "stroke-width": trace.width || 2, "stroke-dasharray": DASHES[trace.dash] }));
        if (trace.marks) key.append(symbol(at(trace.symbol, 0) || "circle", 11, 5, Math.min(at(trace.marks, 0), 9), colour));
        const item = html("span", hidden.has(i) ? "off" : "", key, trace.name);
        item.addEventListener("click", () => { hidden.has(i) ? hidden.delete(i) : hidden.add(i); render(); });
        made.append(item);
      });
      return made;
    };
    const render = () => {
      const width = node.clientWidth;
      if (!width) return;
      const head = figure.legend === false || figure.panels ? null : legend();
      node.replaceChildren(...(head ? [head] : []), hint);
      hint.hidden = true;
      for (const panel of figure.panels || [figure]) {
        const height = Math.max(110, (panel.height || 330) - (head ? head.offsetHeight : 0));
        const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
        node.insertBefore(root, hint);
        const traces = (panel.traces || []).filter((_, i) => panel !== figure || !hidden.has(i));
        listen(root, draw(root, panel, traces, width, height, zoom));
      }
      node.classList.add("drawn");
    };
    const listen = (root, drawn) => {
      let from = null;
      const guide = svg("path", { class: "axis" }), chosen = svg("rect", { fill: "rgba(128,136,148,.25)" });
      root.append(guide, chosen);
      const place = (event) => { const box = root.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      const point = (event) => {
        const [px, py] = place(event), text = hintAt(drawn, px, py);
        guide.setAttribute("d", text && drawn.unified ? `M${px} ${drawn.top}V${drawn.bottom}` : "");
        if (from !== null) for (const [key, value] of Object.entries({ x: Math.min(from, px), y: drawn.top, width: Math.abs(px - from), height: drawn.bottom - drawn.top })) chosen.setAttribute(key, value);
        hint.hidden = !text;
        if (!text) return;
        hint.textContent = text;
        hint.style.left = `${Math.max(0, Math.min(px + 14, node.clientWidth - hint.offsetWidth))}px`;
        hint.style.top = `${Math.max(0, root.offsetTop || root.getBoundingClientRect().top - node.getBoundingClientRect().top) + Math.max(0, py - hint.offsetHeight - 10)}px`;
      };
      root.addEventListener("pointermove", point);
      root.addEventListener("pointerdown", (event) => {
        point(event);
        if (event.pointerType === "mouse" && !event.button && drawn.points.length) from = place(event)[0];
      });
      root.addEventListener("pointerup", (event) => {
        const [px] = place(event), start = from;
        from = null;
        if (start === null || Math.abs(px - start) < 8) return;
        const ends = [start, px].map((one) => drawn.x.back(Math.max(drawn.left, Math.min(drawn.right, one))));
        zoom = ends.sort((a, b) => a - b);
        render();
      });
      root.addEventListener("pointerleave", () => { hint.hidden = true; from = null; chosen.setAttribute("width", 0); });
      root.addEventListener("dblclick", () => { if (zoom) { zoom = null; render(); } });
    };
    node.redraw = (next) => { node.figure = figure = next; render(); };
    node.redraw(figure);
    let before = node.clientWidth;
    new ResizeObserver(() => { if (node.clientWidth !== before) { before = node.clientWidth; render(); } }).observe(node);
  };
})();
