"use strict";
(async () => {
  // ---------------------------------------------------------------- data
  const TYPES = {
    uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array,
    int32: Int32Array, float32: Float32Array, float64: Float64Array,
  };
  const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const textOf = (id) => document.getElementById(id).textContent;

  const unzip = async (bytes) => {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  };

  const unpack = (value, buffer) => {
    if (Array.isArray(value)) return value.map((v) => unpack(v, buffer));
    if (value === null || typeof value !== "object") return value;
    if (value.$) {
      const [kind, , offset, size] = value.$;
      if (kind === "json") return JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, offset, size)));
      const type = TYPES[kind];
      return new type(buffer, offset, size / type.BYTES_PER_ELEMENT);
    }
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, unpack(v, buffer)]));
  };

  const data = unpack(JSON.parse(textOf("data")), await unzip(bytesOf(textOf("blob"))));
  const items = data.items;
  const count = items ? items.labels.length : 0;
  const names = data.names || [];
  const sheetTexts = [...document.querySelectorAll("script.sheet")];

  // ---------------------------------------------------------------- small helpers
  // Class names are untrusted: every text goes through textContent, never through markup.
  const put = (node, children) => {
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== false) node.append(child);
    }
    return node;
  };
  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    return put(node, children);
  };
  const SVG = "http://www.w3.org/2000/svg";
  const svgEl = (tag, attributes = {}, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const clear = (node) => { node.replaceChildren(); return node; };
  const byId = (id) => document.getElementById(id);
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const grouped = (n) => Math.round(n).toLocaleString("en-US");
  const percent = (fraction) => (isNumber(fraction) ? (100 * fraction).toFixed(1) : "–");
  const decimal = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits).replace("-", "−") : "–");
  const plural = (n, word, many = `${word}s`) => `${grouped(n)} ${n === 1 ? word : many}`;
  const shortName = (name, length = 60) => (name.length > length ? `${name.slice(0, length - 1)}…` : name);
  const nameOf = (c) => names[c] ?? `class ${c}`;
  const bdi = (text, cls) => el("bdi", { class: cls }, text);
  const say = (text) => { byId("live").textContent = text; };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const press = (button, isOn) => button.setAttribute("aria-pressed", String(isOn));
  const pressable = (text, isOn, onclick) => el("button", { type: "button", "aria-pressed": String(isOn), onclick }, text);
  const toggle = (text, isOn, onChange) => {
    let on = isOn;
    const button = pressable(text, on, () => { on = !on; press(button, on); onChange(on); });
    return button;
  };
  const choice = (label, options, chosen, onChange) => {
    const group = el("span", { class: "group", role: "group", "aria-label": label },
      options.map(([value, text]) => pressable(text, value === chosen, () => { group.choose(value); onChange(value); })));
    group.choose = (value) => options.forEach(([v], i) => press(group.children[i], v === value));
    return group;
  };

  // Drawings are made for their current width, and again when it changes.
  const drawings = new Map();
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const drawing = drawings.get(entry.target);
      const width = Math.floor(entry.contentRect.width);
      if (drawing && width > 0 && width !== drawing.width) { drawing.width = width; drawing.draw(width); }
    }
  });
  const drawn = (node, draw) => {
    drawings.set(node, { draw, width: 0 });
    sizes.observe(node);
    return node;
  };
  const redraw = (node) => {
    const drawing = drawings.get(node), width = Math.floor(node.clientWidth);
    if (width) { drawing.width = width; drawing.draw(width); }
  };
  const redrawAll = () => { for (const d of drawings.values()) if (d.width) d.draw(d.width); };

  // ---------------------------------------------------------------- items and their pictures
  const NONE = count;
  const K = items && items.neighbors ? items.neighbors.length / count : 0;
  const neighborsOf = (i) => {
    const list = [];
    for (let r = 0; r < K; r++) {
      const j = items.neighbors[i * K + r];
      if (j < NONE) list.push({ item: j, similarity: items.similarities[i * K + r] / data.cosine_steps - 1 });
    }
    return list;
  };
  const hitOf = (i) => items.hits[i]; // 1 right, 0 wrong, 2 no query
  const same = (i, j) => items.labels[i] === items.labels[j];
  const fileOf = (i) => (data.files ? data.files[i] : null);
  const roleOf = (i) => (items.roles ? ["", "Q", "G"][items.roles[i]] : "");
  const cellOf = (i) => (items.cells && items.cells[i] !== 65535 ? items.cells[i] : -1);
  const hasPictures = sheetTexts.length > 0;

  const sheetUrls = [];
  const sheetBlob = (s) => new Blob([bytesOf(sheetTexts[s].textContent)], { type: "image/webp" });
  const sheetUrl = (s) => (sheetUrls[s] ??= URL.createObjectURL(sheetBlob(s)));
  const place = (node, cell, size = "var(--s)") => {
    const [sheet, position] = [cell >> 8, cell & 255];
    node.style.backgroundImage = `url("${sheetUrl(sheet)}")`;
    node.style.backgroundSize = `calc(16 * ${size}) auto`;
    node.style.backgroundPosition = `calc(${-(position % 16)} * ${size}) calc(${-(position >> 4)} * ${size})`;
  };
  // Sheets are decoded when one of their cells comes near the window.
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      nearby.unobserve(entry.target);
      place(entry.target, Number(entry.target.dataset.cell));
    }
  }, { rootMargin: "400px" });

  const KIND_WORDS = { right: "right, ", wrong: "wrong, ", query: "", plain: "" };
  const thumb = (i, { kind = "plain", tag = null, size = "", list = null, says = "" } = {}) => {
    const cell = cellOf(i);
    const picture = el("span", { class: "cell", "data-cell": cell });
    if (cell >= 0) nearby.observe(picture);
    else picture.append(el("span", { class: "word", dir: "auto" }, shortName(nameOf(items.labels[i]), 40)));
    const role = roleOf(i);
    if (role) picture.append(el("span", { class: "corner" }, role));
    const label = `${shortName(nameOf(items.labels[i]))}, ${KIND_WORDS[kind]}${says}image ${i}`;
    const node = el("button", { type: "button", class: `thumb ${kind} ${size}`, "aria-label": label, "data-item": i },
      picture, tag && el("span", { class: "tag" }, tag));
    node.addEventListener("click", () => openPanel(i, list || listOf(node)));
    return node;
  };
  const listOf = (node) => {
    const box = node.closest("[data-list]");
    return box ? [...new Set([...box.querySelectorAll(".thumb")].map((t) => Number(t.dataset.item)))] : null;
  };
  const neighborThumb = (i, { item, similarity }, rank, options = {}) => {
    const right = same(i, item);
    return thumb(item, {
      kind: right ? "right" : "wrong", tag: `${right ? "✓" : "✕"} ${options.tag ?? rank}`,
      says: `rank ${rank}, ${isNumber(similarity) ? `similarity ${decimal(similarity)}, ` : ""}`, ...options.thumb,
    });
  };
  const ownThumb = (i, options = {}) => {
    const own = items.best_own[i];
    if (own >= NONE || !items.first[i]) return null;
    return neighborThumb(i, { item: own }, items.first[i], options);
  };
  // A list that shows its first rows; its button shows more.
  const growing = (rows, first, text) => {
    const box = el("div", { "data-list": "" });
    const more = el("button", { type: "button" }, text);
    let shown = first;
    const fill = () => {
      box.replaceChildren(...rows.slice(0, shown).map((row) => row()));
      more.hidden = rows.length <= shown;
    };
    more.addEventListener("click", () => { shown += 2 * first; fill(); });
    fill();
    return [box, more];
  };
  const firstWords = (i) => {
    if (hitOf(i) === 2) return items.roles && items.roles[i] === 2 ? "in the gallery only" : "no other image of its class";
    return `first right at ${grouped(items.first[i])}`;
  };

  // ---------------------------------------------------------------- charts
  const ticks = (low, high, wanted) => {
    const span = high - low || 1;
    const raw = span / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const list = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) list.push(Math.abs(v) < step * 1e-6 ? 0 : v);
    return list;
  };
  const tickText = (v) => (Math.abs(v) >= 10000 ? `${v / 1000}k` : String(Number(v.toPrecision(4))).replace("-", "−"));
  const DASHES = ["", "6 4", "2 3", "8 3 2 3"];
  const STROKES = ["right", "wrong", "gray", "mark"];
  // Series differ in dash and color; `key` repeats both beside their names.
  const styleOf = (i) => ({ stroke: `var(--${STROKES[i % 4]})`, "stroke-dasharray": DASHES[(i + (i >> 2)) % 4], "stroke-width": 2, fill: "none" });
  const keyOf = (entries) => el("ul", { class: "key" }, entries.map(([text, style]) => {
    const svg = svgEl("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
    svg.append(svgEl("path", { d: "M0 6H26", ...style }));
    return el("li", {}, svg, el("span", {}, text));
  }));
  const frameOf = (node, width, height, label) => {
    const svg = svgEl("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    node.replaceChildren(svg);
    return svg;
  };
  const axes = (svg, { left, top, width, height, x, y, xTicks, yTicks, xName, xText = tickText, yText = tickText }) => {
    for (const v of yTicks) {
      svg.append(svgEl("path", { class: "axis", d: `M${left} ${y(v).toFixed(1)}H${left + width}` }));
      svg.append(svgEl("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, yText(v)));
    }
    for (const v of xTicks) svg.append(svgEl("text", { x: x(v), y: top + height + 16, "text-anchor": "middle" }, xText(v)));
    if (xName) svg.append(svgEl("text", { x: left + width, y: top + height + 30, "text-anchor": "end" }, xName));
  };
  const lineChart = (node, { series, height, label, low = null, high = null, marks = [], level = null, xName = "step" }) =>
    drawn(node, (full) => {
      const left = 40, right = 12, top = 10, bottom = 34;
      const width = full - left - right, inner = height - top - bottom;
      const all = series.flatMap((s) => [...s.values].filter(isNumber));
      const steps = series.flatMap((s) => [...s.steps]);
      if (!all.length) return;
      const [least, most] = minmax(all);
      const bottomValue = low ?? least, topValue = high ?? most;
      const [x0, x1] = [0, Math.max(minmax(steps)[1], 1)];
      const pad = low === null ? 0.04 * (topValue - bottomValue || 1) : 0;
      const x = (v) => left + width * (v - x0) / (x1 - x0);
      const y = (v) => top + inner * (1 - (v - bottomValue + pad) / (topValue - bottomValue + 2 * pad || 1));
      const svg = frameOf(node, full, height, label);
      axes(svg, { left, top, width, height: inner, x, y, xName, xTicks: ticks(x0, x1, Math.floor(width / 90)), yTicks: ticks(bottomValue, topValue, Math.floor(inner / 28)) });
      if (isNumber(level)) svg.append(svgEl("path", { d: `M${left} ${y(level)}H${left + width}`, stroke: "var(--gray)", "stroke-dasharray": "2 4", "stroke-width": 1.5 }));
      for (const mark of marks) {
        svg.append(svgEl("path", { d: `M${x(mark.step)} ${top}V${top + inner}`, stroke: "var(--mark)", "stroke-width": 1.5 }));
        const end = x(mark.step) > left + width - 90;
        svg.append(svgEl("text", { x: x(mark.step) + (end ? -5 : 5), y: top + 11, "text-anchor": end ? "end" : "start" }, mark.text));
      }
      series.forEach((s, i) => {
        const points = [...s.values].map((v, k) => [x(s.steps[k]), v]).filter(([, v]) => isNumber(v));
        if (points.length > 1) svg.append(svgEl("path", { d: `M${points.map(([px, v]) => `${px.toFixed(1)} ${y(v).toFixed(1)}`).join("L")}`, ...styleOf(s.style ?? i) }));
        if (points.length <= 40) for (const [px, v] of points) svg.append(svgEl("circle", { cx: px, cy: y(v), r: 3, fill: `var(--${STROKES[(s.style ?? i) % 4]})` }));
      });
    });
  const minmax = (values) => {
    let [low, high] = [Infinity, -Infinity];
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  };

  // ---------------------------------------------------------------- sections
  const SECTION_NAMES = {
    scores: "Scores", map: "Map", worst: "Worst queries", classes: "Classes", check: "Images to check",
    embedding: "The embedding", inside: "Inside the method", compare: "Compare", run: "The run",
  };
  const main = byId("main");
  const nav = byId("nav");
  const sections = [];
  const section = (id, build) => {
    const title = SECTION_NAMES[id];
    const faults = (data.faults || []).filter((f) => f.section === id);
    const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title));
    for (const fault of faults) node.append(faultBox(`This section could not be made: ${fault.message}`));
    let hasContent = faults.length > 0;
    try {
      const children = build(node);
      if (children && children.length) { put(node, children); hasContent = true; }
    } catch (error) {
      console.error(`section ${id}`, error);
      node.append(faultBox(`This section could not be drawn: ${error.message}`));
      hasContent = true;
    }
    if (!hasContent) return;
    const link = el("a", { href: `#${id}` }, title);
    // A page that compares starts with the comparison.
    if (id === "compare") { main.prepend(node); nav.prepend(link); sections.unshift(node); return; }
    main.append(node);
    nav.append(link);
    sections.push(node);
  };
  const faultBox = (text) => el("p", { class: "fault" }, text);

  // --- scores
  const sentence = (parts) => parts.map((part) => (typeof part === "string" ? part : el("b", {}, bdi(shortName(nameOf(part.class))))));
  const tile = ({ name, value, low, high }) => {
    const scale = el("span", { class: "scale", "aria-hidden": "true" },
      isNumber(low) && el("i", { style: `left: ${100 * low}%; width: ${100 * (high - low)}%` }),
      el("b", { style: `left: ${100 * clamp(value, 0, 1)}%` }));
    return el("div", { class: "tile" }, el("span", { class: "name" }, name), el("span", { class: "value", "data-score": name }, percent(value)),
      scale, el("span", { class: "range" }, isNumber(low) ? `${percent(low)} to ${percent(high)}` : ""));
  };
  const scoreTable = () => {
    const { table } = data.scores;
    return el("details", {}, el("summary", {}, "All scores"),
      el("div", { class: "box", tabindex: 0, role: "region", "aria-label": "Table of all scores" },
        el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "text", scope: "col" }, "Score"),
          table.splits.map((s) => el("th", { scope: "col" }, s)), el("th", { class: "text minor", scope: "col" }, "Meaning"))),
        el("tbody", {}, table.rows.map(([name, ...values]) => el("tr", {}, el("th", { class: "text", scope: "row" }, name),
          values.map((v) => el("td", {}, v)), el("td", { class: "text minor gray" }, table.meanings[name] || "")))))));
  };
  section("scores", () => {
    if (!data.scores) return null;
    const { tiles, note } = data.scores;
    const left = el("div", {}, el("div", { class: "tiles" }, tiles.map(tile)), note && el("p", { class: "note" }, note));
    const looks = data.looks || [];
    if (looks.length) {
      left.append(el("div", { class: "card" }, el("h3", {}, "Look at these first"),
        el("ul", { class: "looks" }, looks.map((look) => el("li", {},
          el("p", { class: look.warning ? "warning" : "" }, sentence(look.parts), " ", look.section && el("a", { href: `#${look.section}`, "aria-label": `Show: ${SECTION_NAMES[look.section]}` }, "Show")),
          look.items && look.items.length ? el("div", { class: "pics", "data-list": "" }, look.items.map((i) => thumb(i, { size: "s44", kind: look.kind || "plain" }))) : null)))));
    }
    const right = el("div", {}, prefixCard(), curveCards());
    if (!right.children.length) return [left, scoreTable()];
    return [el("div", { class: "two" }, left, right), scoreTable()];
  });

  function prefixCard() {
    if (!data.prefixes) return null;
    const { widths, scores } = data.prefixes;
    const series = scores.map((s, i) => ({ steps: widths, values: s.values, style: i }));
    const node = el("div");
    lineChart(node, { series, height: 180, low: 0, high: 100, label: "Test scores against the length of the prefix", xName: "numbers" });
    const table = el("table", { class: "prefixes" }, el("thead", {}, el("tr", {}, el("th", { class: "text", scope: "col" }, "First numbers"), widths.map((w) => el("th", { scope: "col" }, String(w))))),
      el("tbody", {}, scores.map((s) => el("tr", {}, el("th", { class: "text", scope: "row" }, s.name), s.values.map((v) => el("td", {}, v.toFixed(1)))))));
    return el("div", { class: "card" }, el("h3", {}, "Scores by prefix"), node, keyOf(scores.map((s, i) => [s.name, styleOf(i)])),
      el("div", { class: "box", tabindex: 0, role: "region", "aria-label": "Table of scores by prefix" }, table));
  }
  function curveCards() {
    const cards = [];
    const curves = data.curves;
    if (!curves) return cards;
    if (curves.scores && curves.scores.length) {
      const node = el("div");
      const shown = new Set(curves.scores.filter((s) => s.shown).map((s) => s.name));
      const keys = el("div");
      const draw = () => {
        const series = curves.scores.filter((s) => shown.has(s.name)).map((s, i) => ({ ...s, style: i }));
        lineChart(node, { series, height: 220, low: 0, high: 100, marks: curves.marks, level: curves.baseline, label: `Scores while training: ${series.map((s) => s.name).join(", ")}` });
        keys.replaceChildren(keyOf([...series.map((s, i) => [s.name, styleOf(i)]), ...(isNumber(curves.baseline) ? [[`${curves.baseline_name}, R@1 ${curves.baseline.toFixed(1)}`, { stroke: "var(--gray)", "stroke-dasharray": "2 4", "stroke-width": 1.5 }]] : [])]));
        redraw(node);
      };
      draw();
      const others = curves.scores.filter((s) => !s.shown);
      const more = others.length ? el("details", {}, el("summary", {}, "More curves"), el("div", { class: "controls" },
        curves.scores.map((s) => toggle(s.name, s.shown, (on) => { if (on) shown.add(s.name); else shown.delete(s.name); draw(); })))) : null;
      cards.push(el("div", { class: "card" }, el("h3", {}, "Scores while training"), node, keys, more));
    }
    if (curves.loss && curves.loss.steps.length) {
      const node = el("div");
      lineChart(node, { series: [curves.loss], height: 150, label: "Training loss over steps" });
      cards.push(el("div", { class: "card" }, el("h3", {}, "Training loss"), node));
    }
    for (const term of curves.terms || []) {
      const node = el("div");
      lineChart(node, { series: [term], height: 110, label: `${term.name} over steps` });
      cards.push(el("div", { class: "card" }, el("h3", {}, `Term of the loss: ${term.name}`), node));
    }
    return cards;
  }

  // --- map
  let showOnMap = null;
  const fieldOfClass = (label, onChange, id) => {
    const options = el("datalist", { id: `${id}-options` });
    const input = el("input", { type: "text", list: `${id}-options`, placeholder: "all classes", "aria-label": label, autocomplete: "off", dir: "auto" });
    const fill = () => {
      const text = input.value.toLowerCase();
      const matches = [];
      for (let c = 0; c < names.length && matches.length < 1000; c++) if (names[c].toLowerCase().includes(text)) matches.push(names[c]);
      options.replaceChildren(...matches.map((name) => el("option", { value: name })));
    };
    input.addEventListener("focus", () => { if (!options.children.length) fill(); });
    input.addEventListener("input", () => {
      if (names.length > 1000) fill();
      const c = names.indexOf(input.value);
      onChange(c, input.value);
    });
    return { input, options };
  };

  section("map", () => {
    if (!items || !items.x) return null;
    const canvas = el("canvas", { id: "map-canvas", tabindex: 0, role: "application", "aria-label": "Map of the embedding", "aria-describedby": "map-keys" });
    const aside = el("div", { class: "beside", id: "map-panel" });
    const counter = el("span", { class: "note", id: "map-count" });
    const context = canvas.getContext("2d");
    const px = new Float32Array(count), py = new Float32Array(count);
    const onMap = new Uint8Array(count);
    for (let i = 0; i < count; i++) { px[i] = items.x[i] / 65535; py[i] = 1 - items.y[i] / 65535; onMap[i] = items.readable ? items.readable[i] : 1; }
    const mapped = onMap.reduce((a, b) => a + b, 0);
    const view = { x: 0.5, y: 0.5, zoom: 1 };
    let mode = "hits", chosenClass = -1, pictures = hasPictures, selected = -1, width = 0, height = 0, frame = 0;
    const bitmaps = [], waiting = [];
    const bitmap = (s) => {
      if (bitmaps[s]) return bitmaps[s];
      if (!waiting[s]) {
        waiting[s] = createImageBitmap(sheetBlob(s)).then((b) => { bitmaps[s] = b; schedule(); });
      }
      return null;
    };
    const sx = (i) => ((px[i] - view.x) * view.zoom * 0.95 + 0.5) * width;
    const sy = (i) => ((py[i] - view.y) * view.zoom * 0.95 + 0.5) * height;
    const dataX = (x) => (x / width - 0.5) / (view.zoom * 0.95) + view.x;
    const dataY = (y) => (y / height - 0.5) / (view.zoom * 0.95) + view.y;
    const schedule = () => { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); };

    const square = (x, y, r) => context.rect(x - r, y - r, 2 * r, 2 * r);
    const disc = (x, y, r) => { context.moveTo(x + r, y); context.arc(x, y, r, 0, 7); };
    const bins = 6;
    const paint = () => {
      const ratio = window.devicePixelRatio || 1;
      const box = canvas.getBoundingClientRect();
      width = box.width; height = box.height;
      if (!width) return;
      if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
      if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = color("page");
      context.fillRect(0, 0, width, height);
      const [x0, x1, y0, y1] = [dataX(-20), dataX(width + 20), dataY(-20), dataY(height + 20)];
      const visible = [];
      let inside = 0;
      const [ix0, ix1, iy0, iy1] = [dataX(0), dataX(width), dataY(0), dataY(height)];
      for (let i = 0; i < count; i++) {
        if (!onMap[i] || px[i] < x0 || px[i] > x1 || py[i] < y0 || py[i] > y1) continue;
        visible.push(i);
        if (px[i] >= ix0 && px[i] <= ix1 && py[i] >= iy0 && py[i] <= iy1) inside++;
      }
      counter.textContent = `${grouped(inside)} of ${grouped(mapped)} in view`;
      const radius = clamp(Math.sqrt((width * height) / (Math.max(1, inside) * 26)), 1.6, 5);
      const withPictures = pictures && inside <= 400;
      const dots = [], cells = [];
      for (const i of visible) (withPictures && cellOf(i) >= 0 ? cells : dots).push(i);
      if (selected >= 0) lines();
      points(dots, radius);
      for (const i of cells) if (i !== selected) picture(i, 38);
      if (selected >= 0) {
        for (const { item } of neighborsOf(selected)) if (onMap[item]) ring(item, withPictures && cellOf(item) >= 0 ? 0 : radius + 2);
        if (pictures && cellOf(selected) >= 0) picture(selected, 46, true);
        else { points([selected], radius + 2); ring(selected, radius + 5); }
      }
    };
    const points = (list, radius) => {
      const layers = new Map();
      const add = (name, i) => { if (!layers.has(name)) layers.set(name, []); layers.get(name).push(i); };
      for (const i of list) {
        if (mode === "class") add(items.labels[i] === chosenClass ? (hitOf(i) === 0 ? "mark-wrong" : "mark") : "line", i);
        else if (mode === "found") add(`found${Math.min(bins - 1, Math.floor(Math.log2(1 + items.found[i])))}`, i);
        else add(hitOf(i) === 0 ? "wrong" : hitOf(i) === 1 ? "right" : "gray", i);
      }
      const order = ["line", "gray", "right", "found0", "found1", "found2", "found3", "found4", "found5", "wrong", "mark", "mark-wrong"];
      const many = list.length > 8000;
      for (const name of order) {
        const rows = layers.get(name);
        if (!rows) continue;
        if (name.startsWith("found")) context.fillStyle = shade(Number(name[5]) / (bins - 1));
        else context.fillStyle = color(name === "mark-wrong" ? "mark" : name);
        if (many) { // one rectangle is much faster than one arc
          for (const i of rows) { const r = hitOf(i) === 0 ? radius * 1.15 : radius * 0.9; context.fillRect(sx(i) - r, sy(i) - r, 2 * r, 2 * r); }
          continue;
        }
        context.beginPath();
        for (const i of rows) (hitOf(i) === 0 ? square : disc)(sx(i), sy(i), radius);
        context.fill();
      }
    };
    const shade = (t) => {
      const mix = (a, b) => Math.round(a + (b - a) * t);
      const parse = (c) => [1, 3, 5].map((k) => parseInt(c.slice(k, k + 2), 16));
      const [a, b] = [parse(color("line")), parse(color("wrong"))];
      return `rgb(${a.map((v, k) => mix(v, b[k])).join(",")})`;
    };
    const ring = (i, r) => {
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      if (r) { context.beginPath(); context.arc(sx(i), sy(i), r, 0, 7); context.stroke(); }
    };
    const lines = () => {
      context.lineWidth = 1.3;
      for (const { item } of neighborsOf(selected)) {
        if (!onMap[item]) continue;
        const right = same(selected, item);
        context.strokeStyle = color(right ? "right" : "wrong");
        context.setLineDash(right ? [] : [5, 4]);
        context.beginPath();
        context.moveTo(sx(selected), sy(selected));
        context.lineTo(sx(item), sy(item));
        context.stroke();
      }
      context.setLineDash([]);
    };
    const picture = (i, size, isChosen = false) => {
      const cell = cellOf(i);
      const [x, y] = [sx(i) - size / 2, sy(i) - size / 2];
      const sheet = bitmap(cell >> 8);
      context.fillStyle = color("panel");
      context.fillRect(x, y, size, size);
      if (sheet) {
        const s = sheet.width / 16;
        context.drawImage(sheet, (cell & 15) * s, ((cell & 255) >> 4) * s, s, s, x, y, size, size);
      }
      const hit = hitOf(i);
      const name = mode === "class" ? (items.labels[i] === chosenClass ? "mark" : "line")
        : mode === "found" ? null : hit === 0 ? "wrong" : hit === 1 ? "right" : "gray";
      context.strokeStyle = isChosen ? color("ink") : name === null ? shade(clamp(Math.log2(1 + items.found[i]) / (bins - 1), 0, 1)) : color(name);
      context.lineWidth = isChosen ? 4 : 3;
      context.setLineDash(hit === 0 && !isChosen ? [5, 3] : []);
      context.strokeRect(x, y, size, size);
      context.setLineDash([]);
    };

    const choose = (i, { quiet = false } = {}) => {
      selected = i;
      fillAside();
      schedule();
      if (!quiet && i >= 0) say(`${nameOf(items.labels[i])}, ${firstWords(i)}`);
    };
    const fillAside = () => {
      clear(aside);
      if (selected < 0) { aside.append(el("p", { class: "gray" }, "No image is selected.")); return; }
      const near = neighborsOf(selected);
      put(aside, [
        el("div", { class: "pics" }, thumb(selected, { size: "s120", kind: "query", list: [selected, ...near.map((n) => n.item)] })),
        el("h3", { class: "clamp" }, bdi(nameOf(items.labels[selected]))),
        el("p", { class: "note" }, `${firstWords(selected)}; found by ${plural(items.found[selected], "query", "queries")}`),
        el("h3", {}, "Nearest images"),
        el("div", { class: "pics", "data-list": "" }, near.map((n, r) => neighborThumb(selected, n, r + 1, { tag: decimal(n.similarity), thumb: { size: "s44" } }))),
      ]);
      const own = ownThumb(selected, { thumb: { size: "s44" } });
      if (own && items.first[selected] > near.length) put(aside, [el("h3", {}, "Nearest of its class"), el("div", { class: "pics" }, own)]);
    };
    const zoomBy = (factor, x = width / 2, y = height / 2) => {
      const zoom = clamp(view.zoom * factor, 0.8, 400);
      const [fx, fy] = [dataX(x), dataY(y)];
      const scale = view.zoom / zoom;
      view.x = fx + (view.x - fx) * scale;
      view.y = fy + (view.y - fy) * scale;
      view.zoom = zoom;
      view.x = clamp(view.x, -0.2, 1.2);
      view.y = clamp(view.y, -0.2, 1.2);
      schedule();
    };
    const isVisible = (i) => i >= 0 && sx(i) >= 0 && sx(i) <= width && sy(i) >= 0 && sy(i) <= height;
    // Keys zoom about the selected image, so that the view is never empty.
    const zoomByKey = (factor) => {
      if (selected < 0) select(nearestTo(width / 2, height / 2, Infinity));
      if (!isVisible(selected)) { view.x = px[selected]; view.y = py[selected]; }
      zoomBy(factor, sx(selected), sy(selected));
    };
    const select = (i) => { if (i >= 0) choose(i); };
    const nearestTo = (x, y, most) => {
      let best = -1, distance = most * most;
      for (let i = 0; i < count; i++) {
        if (!onMap[i]) continue;
        const d = (sx(i) - x) ** 2 + (sy(i) - y) ** 2;
        if (d < distance) { distance = d; best = i; }
      }
      return best;
    };
    const whole = () => { Object.assign(view, { x: 0.5, y: 0.5, zoom: 1 }); schedule(); };
    canvas.addEventListener("keydown", (event) => {
      const step = 0.12 / view.zoom;
      const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (moves[event.key]) {
        view.x = clamp(view.x + moves[event.key][0], -0.1, 1.1);
        view.y = clamp(view.y + moves[event.key][1], -0.1, 1.1);
        schedule();
      } else if (event.key === "+" || event.key === "=") zoomByKey(1.5);
      else if (event.key === "-") zoomByKey(1 / 1.5);
      else if (event.key === "Enter") select(nearestTo(width / 2, height / 2, Infinity));
      else if (event.key === "Escape") choose(-1);
      else if (event.key === "0") whole();
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoomBy(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    const pointers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      canvas.setPointerCapture(event.pointerId);
      moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const now = [event.clientX, event.clientY];
      const all = [...pointers.values()];
      if (all.length === 2) {
        const other = all.find((p) => p !== before);
        const box = canvas.getBoundingClientRect();
        const spread = (a) => Math.hypot(a[0] - other[0], a[1] - other[1]) || 1;
        zoomBy(spread(now) / spread(before), (now[0] + other[0]) / 2 - box.left, (now[1] + other[1]) / 2 - box.top);
      } else if (event.pointerType === "mouse" || document.activeElement === canvas) {
        view.x -= (now[0] - before[0]) / (width * view.zoom * 0.95);
        view.y -= (now[1] - before[1]) / (height * view.zoom * 0.95);
        schedule();
      }
      moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
      pointers.set(event.pointerId, now);
    });
    const release = (event) => {
      if (!pointers.delete(event.pointerId) || moved > 6 || event.type === "pointercancel") return;
      const box = canvas.getBoundingClientRect();
      select(nearestTo(event.clientX - box.left, event.clientY - box.top, pictures ? 24 : 14));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("dblclick", (event) => {
      const box = canvas.getBoundingClientRect();
      zoomBy(2, event.clientX - box.left, event.clientY - box.top);
    });

    const classField = fieldOfClass("Class to color", (c) => {
      chosenClass = c;
      if (c >= 0) { mode = "class"; modes.choose("class"); fillKey(); }
      schedule();
    }, "map-class");
    const key = el("p", { class: "note", id: "map-key" });
    const fillKey = () => {
      key.textContent = {
        hits: "Blue discs: the nearest image is of the same class. Orange squares and dashed frames: it is of another class.",
        found: `Darker orange: more queries have the image among their ${data.neighbors} nearest. Squares: the nearest image is of another class.`,
        class: "Yellow: images of the chosen class; all others are gray. Squares: the nearest image is of another class.",
      }[mode] + (items.roles ? " Images of queries and of the gallery are shown alike; pictures are marked Q or G." : "");
    };
    const modes = choice("Color of the points", [["hits", "right / wrong"], ["found", "how often found"], ["class", "one class"]], mode, (value) => {
      mode = value;
      if (mode === "class" && chosenClass < 0) {
        chosenClass = selected >= 0 ? items.labels[selected] : 0;
        classField.input.value = nameOf(chosenClass);
      }
      fillKey();
      schedule();
    });
    fillKey();
    const save = () => canvas.toBlob((blob) => {
      const link = el("a", { href: URL.createObjectURL(blob), download: "map.png" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    showOnMap = (i) => {
      view.x = px[i]; view.y = py[i]; view.zoom = Math.max(view.zoom, 6);
      choose(i, { quiet: true });
      canvas.scrollIntoView({ block: "center" });
      canvas.focus({ preventScroll: true });
    };
    drawn(canvas.parentNode || canvas, schedule);
    choose(data.worst && data.worst.order.length ? data.worst.order[0] : onMap.indexOf(1), { quiet: true });
    return [
      el("div", { class: "controls" }, modes, el("label", {}, "Class", classField.input), classField.options,
        hasPictures && toggle("Pictures", true, (on) => { pictures = on; schedule(); }),
        el("button", { type: "button", onclick: whole }, "Whole map"),
        el("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoomByKey(1.5) }, "+"),
        el("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoomByKey(1 / 1.5) }, "−"),
        el("button", { type: "button", onclick: save }, "Save PNG"), counter),
      key,
      el("div", { class: "mapbox" }, el("div", { class: "canvas" }, canvas), aside),
      el("p", { class: "note", id: "map-keys" }, data.map_note || "", " Drag to move, Ctrl and the wheel to zoom. Keys: arrows move, + and − zoom, 0 shows the whole map, Enter selects the image nearest the middle, Escape clears the selection."),
    ];
  });

  // --- worst queries
  section("worst", () => {
    if (!data.worst || !data.worst.order.length) return null;
    const { order } = data.worst;
    const all = [...order];
    let chosenClass = -1, everything = false, shown = 10;
    const list = el("ol", { class: "rows", "data-list": "" });
    const status = el("span", { class: "note", role: "status" });
    const more = el("button", { type: "button" });
    const rows = () => {
      if (chosenClass >= 0) return all.filter((i) => items.labels[i] === chosenClass);
      if (everything) return all;
      const perClass = new Map();
      return all.filter((i) => {
        const n = (perClass.get(items.labels[i]) || 0) + 1;
        perClass.set(items.labels[i], n);
        return n <= 3;
      });
    };
    const worstRow = (i) => el("li", { class: "row" },
      el("div", { class: "who" }, el("div", { class: "clamp" }, bdi(nameOf(items.labels[i]))), el("div", { class: "note" }, firstWords(i))),
      el("div", { class: "pics" }, thumb(i, { kind: "query", tag: "query" }), el("span", { class: "gap" }),
        neighborsOf(i).slice(0, data.shown_neighbors).map((n, r) => neighborThumb(i, n, r + 1)), el("span", { class: "gap" }), ownThumb(i)));
    const fill = () => {
      const found = rows();
      list.replaceChildren(...found.slice(0, shown).map(worstRow));
      const rest = found.length - shown;
      more.hidden = rest <= 0;
      more.textContent = `Show 10 more of ${grouped(found.length)}`;
      status.textContent = `${plural(found.length, "query", "queries")}${chosenClass < 0 && !everything && found.length < all.length ? `, at most 3 of a class; ${grouped(all.length)} in all` : ""}`;
    };
    more.addEventListener("click", () => { shown += 10; fill(); });
    const field = fieldOfClass("Class of the queries", (c) => { chosenClass = c; shown = 10; fill(); }, "worst-class");
    fill();
    return [
      el("p", {}, "Queries whose nearest image is of another class, sorted by the rank of the first right image, largest first. Right of the gap: the nearest image of the right class."),
      el("div", { class: "controls" }, el("label", {}, "Class", field.input), field.options, toggle("All queries of a class", false, (on) => { everything = on; shown = 10; fill(); }), status),
      list, more,
    ];
  });

  // --- classes
  const sortable = (columns, rowCount, rowOf, { label, first, caption }) => {
    let order = Int32Array.from(first), sorted = -1, ascending = true, text = "";
    const body = el("tbody");
    const status = el("span", { class: "note", role: "status" });
    const heads = columns.map((column, k) => {
      const th = el("th", { scope: "col", class: `${column.text ? "text" : ""} ${column.minor ? "minor" : ""}`, title: column.title });
      if (column.value) th.append(el("button", { type: "button", onclick: () => sort(k) }, column.name));
      else th.append(column.name);
      return th;
    });
    const sort = (k) => {
      ascending = sorted === k ? !ascending : !columns[k].descending;
      sorted = k;
      fill(true);
    };
    const fill = (resort) => {
      if (resort && columns[sorted]) {
        const { value } = columns[sorted];
        const sign = ascending ? 1 : -1;
        const keys = Array.from({ length: rowCount }, (_, i) => value(i));
        order = Int32Array.from(order).sort((a, b) => {
          const [u, v] = [keys[a], keys[b]];
          if (typeof u === "string") return sign * u.localeCompare(v, "en", { numeric: true }) || a - b;
          if (Number.isNaN(u) || Number.isNaN(v)) return Number.isNaN(u) - Number.isNaN(v) || a - b;
          return sign * (u - v) || a - b;
        });
      }
      heads.forEach((th, k) => {
        if (k === sorted) th.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        else th.removeAttribute("aria-sort");
      });
      const found = [];
      let matches = 0;
      for (const i of order) {
        if (text && !nameOf(i).toLowerCase().includes(text)) continue;
        matches++;
        if (found.length < 200) found.push(i);
      }
      body.replaceChildren(...found.map(rowOf));
      status.textContent = matches > found.length ? `the first ${found.length} of ${plural(matches, "class", "classes")}` : plural(matches, "class", "classes");
    };
    fill(false);
    const search = el("input", { type: "search", "aria-label": `Search: ${label}`, placeholder: "search", dir: "auto" });
    search.addEventListener("input", () => { text = search.value.toLowerCase(); fill(false); });
    return [el("div", { class: "controls" }, search, status),
      el("div", { class: "box", tabindex: 0, role: "region", "aria-label": label },
        el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, heads)), body))];
  };

  section("classes", () => {
    const table = data.classes;
    if (!table) return null;
    const c = (name) => table[name];
    const number = (name) => (i) => (c(name)[i] === undefined ? NaN : c(name)[i]);
    const hasNext = Boolean(table.next);
    const columns = [
      { name: "Class", text: true, value: (i) => nameOf(i) },
      { name: "Images", value: number("count"), descending: true, minor: true, title: "images of the class in the test split" },
      { name: "R@1", value: number("upper"), title: `fraction of its queries whose nearest image is right; sorted by the upper end of its ${data.level} range` },
      { name: "MAP@R", value: number("map_at_r"), minor: true, title: "mean average precision at R" },
      { name: "Inside", value: number("inside"), minor: true, title: "mean cosine of two of its images" },
    ];
    if (hasNext) {
      columns.push({ name: "Next", value: number("next_similarity"), descending: true, minor: true, title: "largest cosine of its mean with the mean of another class" },
        { name: "Next class", text: true, value: (i) => nameOf(c("next")[i]), title: "the class with that mean" },
        { name: "Gap", value: (i) => c("inside")[i] - c("next_similarity")[i], minor: true, title: "inside minus next; a negative gap means that the class overlaps another" });
    }
    const link = (i) => {
      const example = table.example[i];
      const text = bdi(shortName(nameOf(i), 80));
      return example < NONE ? el("button", { type: "button", class: "name", "aria-label": `Show images of ${shortName(nameOf(i))}`, onclick: () => openPanel(example, itemsOfClass(i)) }, text) : text;
    };
    const rowOf = (i) => el("tr", {}, el("th", { scope: "row", class: "text" }, link(i)),
      el("td", { class: "minor" }, grouped(c("count")[i])), el("td", {}, percent(c("recall")[i])), el("td", { class: "minor" }, percent(c("map_at_r")[i])),
      el("td", { class: "minor" }, decimal(c("inside")[i])),
      hasNext ? [el("td", { class: "minor" }, decimal(c("next_similarity")[i])), el("td", { class: "text" }, bdi(shortName(nameOf(c("next")[i]), 50))),
        el("td", { class: "minor" }, decimal(c("inside")[i] - c("next_similarity")[i]))] : null);
    const left = el("div", {}, el("h3", {}, "Worst first"), sortable(columns, names.length, rowOf, { label: "Table of classes", first: table.order, caption: "Scores of every class, worst first" }),
      el("p", { class: "note" }, `Sorted by the upper end of the ${data.level} range of R@1 (Wilson), so that small classes do not fill the list. Inside: mean cosine of two images of the class. Next: cosine with the mean of the nearest other class.`));
    const mixed = data.confusions;
    if (!mixed || !mixed.pairs.length) return [left];
    const box = el("div", { class: "box", tabindex: 0, role: "region", "aria-label": "Confused classes", "data-list": "" });
    box.style.padding = "0 12px";
    box.append(...mixed.pairs.map((pair) => el("div", { class: "pair" },
      el("p", {}, el("b", {}, bdi(shortName(nameOf(pair.a)))), " taken for ", el("b", {}, bdi(shortName(nameOf(pair.b)))),
        el("span", { class: "gray" }, `: ${grouped(pair.count)} of ${grouped(pair.of)}${pair.back ? `, in the other direction ${grouped(pair.back)}` : ""}`)),
      pair.examples.map(([query, found]) => el("span", { class: "pairs" }, thumb(query, { kind: "query", size: "s44" }), thumb(found, { kind: "wrong", size: "s44" }))))));
    return [el("div", { class: "wide" }, left, el("div", {}, el("h3", {}, "Confused classes"), box,
      el("p", { class: "note" }, "Queries of the first class whose nearest image is of the second. Each pair shows a query and its nearest image.")))];
  });
  const itemsOfClass = (c) => {
    const list = [];
    for (let i = 0; i < count; i++) if (items.labels[i] === c) list.push(i);
    return list;
  };

  // --- images to check
  section("check", () => {
    const check = data.check;
    if (!check) return null;
    // Numbers are items, whose classes are named.
    const said = (...parts) => el("p", {}, parts.map((part) => (typeof part === "number" ? el("b", {}, bdi(shortName(nameOf(items.labels[part]))))
      : typeof part === "string" ? el("span", { class: "gray" }, part) : part)));
    const kinds = [
      ["suspects", "Labels that may be wrong", (s) => [
        said(s.item, " may be ", s.other, `: ${decimal(s.to_own)} to its own class, ${decimal(s.to_other)} to that one`, fileNote(s.item)),
        thumb(s.item, { kind: "query", tag: "image", size: "s52" }),
        s.own < NONE ? thumb(s.own, { kind: "right", tag: "✓ own", size: "s52" }) : null,
        thumb(s.other, { kind: "wrong", tag: "✕ other", size: "s52" })]],
      ["duplicates", "Almost the same picture, two labels", (d) => [
        said(d.a, " and ", d.b, `: cosine ${decimal(d.similarity, 3)}`, fileNote(d.a), fileNote(d.b)), thumb(d.a, { size: "s52" }), thumb(d.b, { size: "s52" })]],
      ["leaks", "Also among the training images", (d) => [
        said(d.item, " resembles a training image of ", el("b", {}, bdi(shortName(d.train_class))), `: cosine ${decimal(d.similarity, 3)}`, fileNote(d.item)),
        thumb(d.item, { size: "s52" })]],
      ["hubs", "Hubs: wrong neighbors of many queries", (h) => [
        said(h.item, `: among the ${data.neighbors} nearest of ${plural(h.found, "query", "queries")}, ${grouped(h.wrong)} of them of another class`),
        thumb(h.item, { kind: "query", tag: "hub", size: "s52" }), h.queries.map((q) => thumb(q, { kind: "wrong", tag: "✕", size: "s44", says: "finds it, " }))]],
    ];
    const blocks = kinds.filter(([key]) => check[key] && check[key].length).map(([key, title, cells]) => {
      const rows = check[key].map((entry) => () => el("div", { class: "pair" }, cells(entry)));
      return el("div", {}, el("h3", {}, title), el("p", { class: "note" }, check[`${key}_note`]), growing(rows, 8, `Show more of ${grouped(rows.length)}`));
    });
    const notes = check.refusal ? [el("p", { class: "note" }, check.refusal)] : [];
    if (!blocks.length) return notes.length ? notes : null;
    return [el("p", {}, "Candidates, not verdicts: look at the pictures."), el("div", { class: "two" }, blocks), ...notes];
  });
  function fileNote(i) {
    const file = fileOf(i);
    return file ? el("span", { class: "note" }, el("br"), el("code", {}, bdi(file))) : null;
  }

  // --- the embedding
  section("embedding", () => {
    const facts = data.embedding;
    if (!facts) return null;
    const parts = [];
    const { positives, negatives } = facts;
    if (positives && negatives) {
      const n = positives.length;
      const total = (a) => a.reduce((s, v) => s + v, 0);
      const [pTotal, nTotal] = [total(positives), total(negatives)];
      const node = el("div");
      const line = { t: null };
      const density = (counts, whole, width, first, last) => {
        const columns = Math.max(20, Math.min(160, Math.floor(width / 6)));
        const out = new Float64Array(columns);
        for (let b = first; b <= last; b++) out[Math.min(columns - 1, Math.floor((b - first) / (last - first + 1) * columns))] += counts[b] / (whole || 1);
        return out;
      };
      let first = 0, last = n - 1;
      while (first < n - 1 && !positives[first] && !negatives[first]) first++;
      while (last > 0 && !positives[last] && !negatives[last]) last--;
      const valueOf = (bin) => -1 + 2 * bin / n;
      const draw = (width) => {
        const height = 240, left = 12, top = 10, bottom = 34, inner = height - top - bottom, wide = width - 2 * left;
        const svg = frameOf(node, width, height, "Histograms of the cosine of pairs of one class and of pairs of two classes");
        const [a, b] = [density(positives, pTotal, wide, first, last), density(negatives, nTotal, wide, first, last)];
        const most = Math.max(...a, ...b) || 1;
        const x = (v) => left + wide * (v - valueOf(first)) / (valueOf(last + 1) - valueOf(first));
        const path = (values, closed) => {
          let d = closed ? `M${left} ${top + inner}` : "";
          values.forEach((v, k) => {
            const [x0, x1, yy] = [left + wide * k / values.length, left + wide * (k + 1) / values.length, top + inner * (1 - v / most)];
            d += `${d ? "L" : "M"}${x0.toFixed(1)} ${yy.toFixed(1)}L${x1.toFixed(1)} ${yy.toFixed(1)}`;
          });
          return closed ? `${d}L${left + wide} ${top + inner}Z` : d;
        };
        svg.append(svgEl("path", { d: path(a, true), fill: "var(--right)", "fill-opacity": 0.28 }));
        svg.append(svgEl("path", { d: path(a), fill: "none", stroke: "var(--right)", "stroke-width": 2 }));
        svg.append(svgEl("path", { d: path(b), fill: "none", stroke: "var(--wrong)", "stroke-width": 2, "stroke-dasharray": "5 4" }));
        axes(svg, { left, top, width: wide, height: inner, x, y: () => top + inner, yTicks: [0], yText: () => "", xTicks: ticks(valueOf(first), valueOf(last + 1), Math.floor(wide / 90)), xName: "cosine of a pair" });
        if (line.t !== null) {
          svg.append(svgEl("path", { d: `M${x(line.t)} ${top - 6}V${top + inner}`, stroke: "var(--ink)", "stroke-width": 2 }));
          svg.append(svgEl("text", { x: x(line.t) + (x(line.t) > width - 120 ? -6 : 6), y: top + 4, class: "halo", "text-anchor": x(line.t) > width - 120 ? "end" : "start" }, `threshold ${decimal(line.t, 3)}`));
        }
      };
      drawn(node, draw);
      parts.push(el("h3", {}, "Similarity of pairs, and a threshold"), node,
        keyOf([[`pairs of one class (${grouped(pTotal)})`, { stroke: "var(--right)", "stroke-width": 2 }], [`pairs of two classes (${grouped(nTotal)})`, { stroke: "var(--wrong)", "stroke-width": 2, "stroke-dasharray": "5 4" }]]));
      const offers = facts.thresholds || [];
      if (offers.length) {
        const slider = el("input", { type: "range", min: 0, max: offers.length - 1, step: 1, id: "fmr" });
        const words = el("p", { class: "sentence", "aria-live": "polite", id: "fmr-words" });
        const update = () => {
          const offer = offers[Number(slider.value)];
          line.t = offer.threshold;
          const text = `1 in ${grouped(1 / offer.fmr)}`;
          slider.setAttribute("aria-valuetext", text);
          words.textContent = `At threshold ${decimal(offer.threshold, 3)}, ${text} pairs of different classes pass, and ${percent(offer.fnmr)} % of the pairs of one class are refused.`;
          redraw(node);
        };
        const start = offers.findIndex((o) => o.fmr <= 0.00101);
        slider.value = start < 0 ? offers.length - 1 : start;
        slider.addEventListener("input", update);
        parts.push(el("div", { class: "threshold" }, el("label", { for: "fmr" }, "False matches, from many to few"), slider), words);
        update();
      }
      parts.push(el("p", { class: "note" }, "Large classes dominate: a class has a weight of the square of its size."));
    }
    const columns = [];
    if (facts.spectrum && facts.spectrum.length > 1) {
      const node = el("div");
      const logs = [...facts.spectrum].map((v) => (v > 0 ? Math.log10(v) : NaN));
      lineChart(node, { series: [{ steps: logs.map((_, i) => i + 1), values: logs }], height: 240, label: "Fraction of the variance in every direction, as a power of ten", xName: "direction" });
      columns.push(el("div", {}, el("h3", {}, "Spectrum"), node, el("p", { class: "note" }, "Fraction of the variance in every direction, as a power of ten. The directions after a steep fall are unused.")));
    }
    if (facts.numbers && facts.numbers.length) {
      columns.push(el("div", {}, el("h3", {}, "Numbers"), el("table", { class: "numbers" }, el("tbody", {}, facts.numbers.map(([name, value, meaning]) =>
        el("tr", {}, el("th", { class: "text", scope: "row" }, name), el("td", {}, value), el("td", { class: "text gray" }, meaning)))))));
    }
    if (columns.length) { const two = el("div", { class: "two" }, columns); two.style.marginTop = "24px"; parts.push(two); }
    return parts;
  });

  // --- inside the method
  const decode64 = (canvas, width, height, colorAt) => {
    canvas.width = width; canvas.height = height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      const [r, g, b, a] = colorAt(i);
      image.data.set([r, g, b, a], 4 * i);
    }
    context.putImageData(image, 0, 0);
    return canvas;
  };
  const heat = (t) => [Math.round(255 * Math.min(1, 0.06 + 1.35 * t)), Math.round(235 * t ** 1.6), Math.round(255 * (0.22 + 0.45 * Math.sin(Math.PI * clamp(1.15 * t, 0, 1)))), 255];
  const VIEWS = {
    matrix: (view) => {
      const n = view.items.length, layers = view.values.length / (n * n);
      const canvas = el("canvas", { role: "img", "aria-label": `${view.title}: ${view.rows} down the side, ${view.columns} along the top` });
      const words = el("p", { class: "note", role: "status" }, "Move over the matrix, or tap it, to see the attention from one image to another.");
      const [low, high] = minmax(view.values);
      let layer = 0, row = 0, column = 0;
      const draw = () => decode64(canvas, n, n, (k) => heat((view.values[layer * n * n + k] - low) / (high - low || 1)));
      draw();
      const strip = (vertical) => {
        const node = el("div", { class: "strip", "aria-hidden": "true" });
        node.style[vertical ? "gridTemplateRows" : "gridTemplateColumns"] = `repeat(${n}, minmax(0, 1fr))`;
        view.items.forEach((i) => {
          const bit = el("span", { class: "bit" });
          if (cellOf(i) >= 0) {
            const [sheet, position] = [cellOf(i) >> 8, cellOf(i) & 255];
            bit.style.backgroundImage = `url("${sheetUrl(sheet)}")`;
            bit.style.backgroundSize = "1600% auto";
            bit.style.backgroundPositionX = `${(position % 16) / 15 * 100}%`;
            const lines = data.sheet_rows[sheet];
            bit.style.backgroundPositionY = `${lines > 1 ? (position >> 4) / (lines - 1) * 100 : 0}%`;
          }
          node.append(bit);
        });
        return node;
      };
      const at = (event) => {
        const box = canvas.getBoundingClientRect();
        return [clamp(Math.floor((event.clientY - box.top) / box.height * n), 0, n - 1), clamp(Math.floor((event.clientX - box.left) / box.width * n), 0, n - 1)];
      };
      const pair = el("div", { class: "pics" });
      const show = (r, c) => {
        [row, column] = [r, c];
        const [i, j] = [view.items[r], view.items[c]];
        words.replaceChildren(`${view.rows}: `, bdi(shortName(nameOf(items.labels[i]))), `; ${view.columns}: `, bdi(shortName(nameOf(items.labels[j]))), `; value ${decimal(view.values[layer * n * n + r * n + c], 4)} (the mean is ${decimal(1 / n, 4)})`);
        const strongest = [...Array(n).keys()].sort((a, b) => view.values[layer * n * n + r * n + b] - view.values[layer * n * n + r * n + a]).slice(0, 8);
        pair.replaceChildren(thumb(i, { kind: "query", size: "s44", tag: "image" }), ...strongest.map((k) => thumb(view.items[k], { kind: same(i, view.items[k]) ? "right" : "wrong", size: "s44", tag: decimal(view.values[layer * n * n + r * n + k], 3) })));
      };
      canvas.addEventListener("pointermove", (event) => show(...at(event)));
      canvas.addEventListener("pointerdown", (event) => show(...at(event)));
      const grid = el("div", { class: "matrix" }, el("span"), strip(false), strip(true), canvas);
      grid.style.gridTemplateColumns = `minmax(0, 1fr) minmax(0, ${n}fr)`;
      show(0, 0);
      return [layers > 1 ? el("div", { class: "controls" }, choice("Layer", Array.from({ length: layers }, (_, k) => [k, `layer ${k + 1}`]), 0, (k) => { layer = k; draw(); show(row, column); })) : null,
        grid, words, el("p", { class: "note" }, "The largest values of this row:"), pair];
    },
    maps: (view) => {
      const n = view.items.length, [m, h, w] = view.shape;
      const rows = Array.from(view.items, (item, r) => el("tr", {}, el("td", {}, thumb(item, { kind: "query" })),
        Array.from({ length: m }, (_, k) => {
          const cell = el("span", { "aria-hidden": "true" });
          const picture = el("div", { class: "overlay" });
          picture.style.setProperty("--s", "72px");
          if (cellOf(item) >= 0) { place(cell, cellOf(item), "72px"); cell.style.opacity = 0.55; cell.style.filter = "grayscale(1)"; picture.append(cell); }
          const canvas = decode64(el("canvas", { "aria-hidden": "true" }), w, h, (q) => {
            const v = view.values[((r * m + k) * h * w) + q] / 127;
            return v >= 0 ? [224, 106, 20, Math.round(215 * v)] : [0, 105, 168, Math.round(-215 * v)];
          });
          picture.append(canvas);
          return el("td", {}, picture);
        })));
      return [el("div", { class: "maps", tabindex: 0, role: "region", "aria-label": view.title }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "image"), Array.from({ length: m }, (_, k) => el("th", { scope: "col" }, `learner ${k + 1}`)))), el("tbody", {}, rows))),
        el("p", { class: "note" }, "Orange: the mask of the learner is above the mean of all learners; blue: below. Every image has its own scale.")];
    },
    histograms: (view) => {
      const node = el("div");
      const series = Object.entries(view.counts).map(([name, values], i) => {
        const total = values.reduce((s, v) => s + v, 0) || 1;
        const centers = [...values].map((_, k) => (view.edges[k] + view.edges[k + 1]) / 2);
        return { name, steps: centers, values: [...values].map((v) => v / total * values.length / (view.edges[view.edges.length - 1] - view.edges[0])), style: i };
      });
      const range = [view.edges[0], view.edges[view.edges.length - 1]];
      drawn(node, (full) => {
        const height = 200, left = 12, top = 8, bottom = 34, width = full - 2 * left, inner = height - top - bottom;
        const svg = frameOf(node, full, height, `${view.title}: ${series.map((s) => s.name).join(", ")}`);
        const most = Math.max(...series.flatMap((s) => s.values)) || 1;
        const x = (v) => left + width * (v - range[0]) / (range[1] - range[0]);
        for (const s of series) svg.append(svgEl("path", { d: `M${s.values.map((v, k) => `${x(s.steps[k]).toFixed(1)} ${(top + inner * (1 - v / most)).toFixed(1)}`).join("L")}`, ...styleOf(s.style) }));
        axes(svg, { left, top, width, height: inner, x, y: () => top + inner, yTicks: [0], yText: () => "", xTicks: ticks(range[0], range[1], Math.floor(width / 90)), xName: view.axis });
      });
      const words = view.means || {};
      return [node, keyOf(series.map((s, i) => [`${s.name}${isNumber(words[s.name]) ? `, mean ${decimal(words[s.name])}` : ""}`, styleOf(i)]))];
    },
    points: (view) => {
      const node = el("div");
      const n = view.x.length;
      drawn(node, (full) => {
        const height = Math.min(420, Math.max(240, full * 0.7));
        const svg = frameOf(node, full, height, view.title);
        const [x0, x1] = minmax(view.x), [y0, y1] = minmax(view.y);
        const x = (v) => 14 + (full - 28) * (v - x0) / (x1 - x0 || 1), y = (v) => height - 14 - (height - 28) * (v - y0) / (y1 - y0 || 1);
        const wheel = (g) => `hsl(${Math.round(360 * g / view.groups)} 65% 48%)`;
        for (let i = 0; i < n; i++) {
          const [cx, cy, stroke] = [x(view.x[i]), y(view.y[i]), wheel(view.group[i])];
          svg.append(view.kind_of[i] ? svgEl("path", { d: `M${cx - 3.5} ${cy - 3.5}L${cx + 3.5} ${cy + 3.5}M${cx - 3.5} ${cy + 3.5}L${cx + 3.5} ${cy - 3.5}`, stroke, "stroke-width": 1.6 })
            : svgEl("circle", { cx, cy, r: 3.6, fill: stroke }));
        }
      });
      return [node, el("p", { class: "note" }, `Discs: ${view.names[0]}. Crosses: ${view.names[1]}. Each color is one of ${view.groups} classes. The first two principal components of ${view.names[0]} span the plane.`)];
    },
  };
  section("inside", () => {
    const views = data.inside || [];
    if (!views.length) return null;
    const cards = views.map((view) => {
      const draw = VIEWS[view.kind];
      const card = el("div", { class: "card" }, el("h3", {}, view.title));
      if (view.note) card.append(el("p", { class: "note" }, view.note));
      if (!draw) return put(card, [el("p", { class: "gray" }, `This page cannot draw a view of the kind "${view.kind}".`)]);
      return put(card, draw(view));
    });
    const small = views.every((v) => v.kind === "histograms" || v.kind === "points");
    return [el("div", { class: small || cards.length > 1 ? "two views" : "views" }, cards)];
  });

  // --- comparison
  section("compare", () => {
    const comparison = data.comparison;
    if (!comparison) return null;
    const { runs, rows } = comparison;
    const parts = [el("p", {}, comparison.note)];
    parts.push(el("div", { class: "box", tabindex: 0, role: "region", "aria-label": "Scores of the runs" }, el("table", {}, el("caption", { class: "hidden" }, "Scores of the runs, and differences from the first"),
      el("thead", {}, el("tr", {}, el("th", { class: "text", scope: "col" }, "Score"), runs.map((run, k) => el("th", { scope: "col" }, bdi(run.name), k ? "" : " (first)")))),
      el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { class: "text", scope: "row" }, row.score), row.cells.map((cell) => el("td", {},
        el("span", { class: cell.is_best ? "best" : "" }, percent(cell.value)),
        cell.verdict ? [el("br"), el("span", { class: "note" }, `${cell.difference >= 0 ? "+" : "−"}${percent(Math.abs(cell.difference))}${isNumber(cell.low) ? ` (${decimal(100 * cell.low, 1)} to ${decimal(100 * cell.high, 1)}), p ${cell.p}` : ", no range"}`), el("br"), el("b", {}, cell.verdict)] : null))))))));
    for (const line of comparison.lines || []) parts.push(el("p", { class: "note" }, line));
    if (comparison.curves && comparison.curves.length) {
      const node = el("div");
      lineChart(node, { series: comparison.curves.map((c, i) => ({ ...c, style: i })), height: 240, low: 0, high: 100, label: "R@1 of the runs while training" });
      parts.push(el("div", { class: "card" }, el("h3", {}, "R@1 while training"), node, keyOf(comparison.curves.map((c, i) => [c.name, styleOf(i)]))));
    }
    if (comparison.maps && comparison.maps.length) {
      const maps = el("div", { class: "two", id: "compare-maps" });
      for (const map of comparison.maps) {
        const dots = ["", "", ""]; // wrong, right, no query
        for (let i = 0; i < map.x.length; i++) dots[map.hits[i]] += `M${(map.x[i] / 164).toFixed(1)} ${(400 - map.y[i] / 164).toFixed(1)}h0`;
        const svg = svgEl("svg", { viewBox: "-4 -4 408 408", width: "100%", role: "img", "aria-label": `Map of ${map.name}` });
        [[2, "var(--gray)", "round"], [1, "var(--right)", "round"], [0, "var(--wrong)", "square"]].forEach(([hit, stroke, cap]) => {
          if (dots[hit]) svg.append(svgEl("path", { d: dots[hit], fill: "none", stroke, "stroke-width": 3, "stroke-linecap": cap }));
        });
        const wrong = map.hits.reduce((sum, hit) => sum + (hit === 0), 0);
        maps.append(el("div", { class: "card" }, el("h3", {}, bdi(map.name)), svg, el("p", { class: "note" }, `${plural(wrong, "query", "queries")} with a wrong nearest image (orange squares). Each map has its own axes.`)));
      }
      parts.push(el("h3", {}, "The embeddings side by side"), maps);
    }
    const changes = el("div", { class: "two" });
    changes.style.marginTop = "20px";
    const list = (title, entries, index) => {
      if (!entries || !entries.length) return;
      const rows = entries.map((entry) => () => el("div", { class: "pair" },
        el("p", {}, el("b", {}, bdi(shortName(nameOf(items.labels[entry.item])))), el("span", { class: "gray" }, ` (${plural(entry.of_class, "query", "queries")} of this class)`)),
        thumb(entry.item, { kind: "query", tag: "query", size: "s52" }),
        entry.found.map((j, k) => (j < NONE ? thumb(j, { kind: same(entry.item, j) ? "right" : "wrong", tag: `${same(entry.item, j) ? "✓" : "✕"} ${shortName(runs[k === 0 ? 0 : index].name, 16)}`, size: "s52" }) : null))));
      changes.append(el("div", {}, el("h3", {}, title), growing(rows, 6, "Show more")));
    };
    for (const change of comparison.changes || []) {
      list(`${plural(change.won_count, "query", "queries")} right only in ${runs[change.run].name}`, change.won, change.run);
      list(`${plural(change.lost_count, "query", "queries")} right only in ${runs[0].name}`, change.lost, change.run);
    }
    if (changes.children.length) parts.push(changes);
    if (comparison.config && comparison.config.length) {
      parts.push(el("details", { open: comparison.config.length <= 12 }, el("summary", {}, comparison.config_title || `${plural(comparison.config.length, "field")} of the configs differ`),
        el("div", { class: "box", tabindex: 0, role: "region", "aria-label": comparison.config_title || "Fields of the configs that differ" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "text", scope: "col" }, "Field"), runs.map((run) => el("th", { class: "text", scope: "col" }, bdi(run.name))))),
          el("tbody", {}, comparison.config.map(([field, ...values]) => el("tr", {}, el("th", { class: "text", scope: "row" }, el("code", {}, field)), values.map((v) => el("td", { class: "text" }, el("code", {}, v))))))))));
    }
    return parts;
  });

  // --- the run
  const GLOSSARY = [
    ["query, gallery", "Every image of the test split is compared with all others. If the data set defines queries and a gallery, its queries are compared with its gallery."],
    ["R@K", "Fraction of the queries with an image of their class among the K nearest."],
    ["RP", "R-precision: fraction of the R nearest images that have the class, where R is the count of other images of the class."],
    ["MAP@R", "Like RP, with a larger weight for hits near the top (Musgrave et al., 2020)."],
    ["range", `${data.level} bootstrap interval over classes: the variation of the score with other classes of the same kind. It does not contain the spread over training seeds.`],
    ["hub", `An image that is among the ${data.neighbors} nearest of unusually many queries.`],
    ["threshold, false match", "With a threshold on the cosine, a false match is a pair of two classes above it."],
    ["effective rank", "The count of directions that the embedding uses: the exponential of the entropy of its spectrum."],
    ["uniformity, alignment", "Uniformity measures how evenly the embedding covers the sphere, alignment how close images of one class are (Wang & Isola, 2020). Smaller is better for both."],
  ];
  section("run", () => {
    const run = data.run;
    if (!run) return null;
    const parts = [];
    const table = el("dl", {}, run.rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, /^[0-9a-f]{40}/.test(value) ? el("code", {}, value) : bdi(value))]));
    const charts = el("div");
    if (run.speed && run.speed.steps.length > 1) {
      const node = el("div");
      lineChart(node, { series: [{ steps: run.speed.steps, values: run.speed.images_per_second }], height: 150, low: 0, label: "Images a second over steps" });
      charts.append(el("div", { class: "card" }, el("h3", {}, "Images a second"), node, run.speed.note ? el("p", { class: "note" }, run.speed.note) : ""));
    }
    parts.push(charts.children.length ? el("div", { class: "two" }, table, charts) : table);
    if (run.config) parts.push(el("details", {}, el("summary", {}, "Config"), el("pre", { tabindex: 0, role: "region", "aria-label": "Config of the run" }, run.config)));
    parts.push(el("details", {}, el("summary", {}, "Glossary"), el("dl", {}, GLOSSARY.map(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]))));
    return parts;
  });

  // ---------------------------------------------------------------- the panel of an image
  const panel = byId("panel");
  let panelList = [], panelAt = 0, opener = null;
  function openPanel(i, list) {
    if (!panel.open) opener = document.activeElement;
    panelList = list && list.includes(i) ? list : [i];
    panelAt = panelList.indexOf(i);
    fillPanel();
    if (!panel.open) panel.showModal();
    byId("panel-close").focus();
  }
  const stepPanel = (by) => {
    const next = panelAt + by;
    if (next < 0 || next >= panelList.length) return;
    panelAt = next;
    const focused = document.activeElement && document.activeElement.id;
    fillPanel();
    const target = byId(focused);
    (target && !target.disabled ? target : byId("panel-close")).focus();
  };
  function fillPanel() {
    const i = panelList[panelAt];
    const near = K ? neighborsOf(i) : [];
    const label = items.labels[i];
    const size = data.classes ? data.classes.count[label] : null;
    clear(panel);
    panel.scrollTop = 0;
    const facts = [
      ["Class", [bdi(nameOf(label)), size ? el("span", { class: "gray" }, ` (${plural(size, "image")})`) : ""]],
      fileOf(i) ? ["File", [el("code", {}, bdi(fileOf(i)))]] : null,
      ["Nearest", [hitOf(i) === 2 ? firstWords(i) : hitOf(i) === 1 ? "✓ right" : `✕ wrong; ${firstWords(i)}`]],
      hitOf(i) !== 2 && items.map_at_r ? ["MAP@R", [percent(items.map_at_r[i] / 255)]] : null,
      items.found ? ["Found by", [`${plural(items.found[i], "query", "queries")}, ${grouped(items.found_wrong[i])} of another class`]] : null,
      roleOf(i) ? ["Role", [roleOf(i) === "Q" ? "query" : "gallery"]] : null,
    ].filter(Boolean);
    put(panel, [
      el("div", { class: "panel-bar" },
        el("button", { type: "button", id: "panel-back", disabled: panelAt === 0, "aria-label": "Previous image", onclick: () => stepPanel(-1) }, "←"),
        el("button", { type: "button", id: "panel-next", disabled: panelAt === panelList.length - 1, "aria-label": "Next image", onclick: () => stepPanel(1) }, "→"),
        el("span", { class: "note" }, panelList.length > 1 ? `${panelAt + 1} of ${grouped(panelList.length)}` : ""),
        showOnMap && (!items.readable || items.readable[i]) ? el("button", { type: "button", id: "panel-map", class: "push", onclick: () => { opener = null; panel.close(); showOnMap(i); } }, "Show on the map") : el("span", { class: "push" }),
        el("button", { type: "button", id: "panel-close", onclick: () => panel.close() }, "Close")),
      el("div", { class: "panel-top" },
        thumb(i, { size: "s192", kind: "query", list: panelList }),
        el("div", {}, el("h2", { id: "panel-title", class: "clamp" }, bdi(nameOf(label))), el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])))),
    ]);
    panel.querySelector("#panel-title").style.margin = "0 0 8px";
    const list = [i, ...near.map((n) => n.item)];
    if (near.length) put(panel, [el("h3", {}, "Nearest images"), el("div", { class: "pics" }, near.map((n, r) => neighborThumb(i, n, r + 1, { tag: decimal(n.similarity), thumb: { list } })))]);
    const own = K ? ownThumb(i, { thumb: { list: [i, items.best_own[i]] } }) : null;
    if (own && items.first[i] > 1) put(panel, [el("h3", {}, "Nearest of its class"), el("div", { class: "pics" }, own)]);
    panel.querySelectorAll("h3").forEach((h) => { h.style.marginTop = "14px"; });
  }
  panel.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") stepPanel(1);
    else if (event.key === "ArrowLeft") stepPanel(-1);
    else return;
    event.preventDefault();
  });
  panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
  panel.addEventListener("close", () => {
    if (opener && opener.isConnected) opener.focus();
    opener = null;
    if (location.hash.startsWith("#item=")) history.replaceState(null, "", location.pathname + location.search);
  });

  // ---------------------------------------------------------------- frame
  const heading = el("div", {}, el("h1", {}, bdi(data.title), data.headline ? `: ${data.headline}` : ""), data.rule ? el("p", { class: "gray" }, data.rule) : null,
    data.warning ? el("p", { class: "warning" }, data.warning) : null,
    (data.faults || []).filter((f) => !sections.some((s) => s.id === f.section)).map((f) => faultBox(`${f.section}: ${f.message}`)));
  main.querySelector("noscript").remove();
  main.prepend(heading);

  const themeButton = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (() => { try { return localStorage.getItem("dmljax-theme"); } catch { return null; } })();
  const setTheme = (theme) => {
    document.documentElement.dataset.theme = theme;
    themeButton.textContent = theme === "dark" ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", theme === "dark" ? "Switch to light colors" : "Switch to dark colors");
    redrawAll();
  };
  setTheme(stored || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!stored) setTheme(system.matches ? "dark" : "light"); });
  themeButton.addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("dmljax-theme", theme); } catch { /* a page from a file may have no storage */ }
    setTheme(theme);
  });

  const mark = () => {
    let current = sections[0];
    for (const node of sections) if (node.getBoundingClientRect().top <= 140) current = node;
    if (window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 4) current = sections[sections.length - 1];
    for (const link of nav.children) {
      if (current && link.hash === `#${current.id}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  let timer;
  addEventListener("scroll", () => { clearTimeout(timer); timer = setTimeout(mark, 60); }, { passive: true });
  mark();

  const openHash = () => {
    const match = location.hash.match(/^#item=(\d+)$/);
    if (match && Number(match[1]) < count) openPanel(Number(match[1]), null);
  };
  addEventListener("hashchange", openHash);
  openHash();

  document.documentElement.dataset.ready = "true";
})().catch((error) => {
  console.error(error);
  const main = document.getElementById("main");
  const note = document.createElement("p");
  note.className = "fault";
  note.textContent = `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  main.append(note);
  document.documentElement.dataset.ready = "failed";
});
