// The picture of the memory, and what is pointed at in it.

const memory = { place: find("memory"), x: null, y: null, svg: null };

function edges(run, column) {
  const end = column + 1 < run.starts.length ? run.starts[column + 1] : run.steps;
  return [memory.x(run.starts[column]), memory.x(end)];
}

// The outline of a band from `low[c]` to `high[c]`, over the columns from `first`.
function band(run, first, low, high) {
  const points = [];
  const corner = (x, y) => points.push(`${x.toFixed(1)} ${memory.y(y).toFixed(1)}`);
  high.forEach((y, i) => edges(run, first + i).forEach((x) => corner(x, y)));
  for (let i = low.length - 1; i >= 0; i -= 1) edges(run, first + i).reverse().forEach((x) => corner(x, low[i]));
  return `M${points.join("L")}Z`;
}

function line(run, heights) {
  const points = heights.flatMap((y, c) => edges(run, c).map((x) => `${x.toFixed(1)} ${memory.y(y).toFixed(1)}`));
  return `M${points.join("L")}`;
}

function drawAxes(svg, width, height, run) {
  for (const mark of bytesMarks(mostBytes)) {
    const y = memory.y(mark.at);
    make("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y, y2: y }, svg);
    make("text", { x: margin.left - 8, y: y + 4, "text-anchor": "end" }, svg, mark.text);
  }
  const floor = height - margin.bottom;
  make("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: floor, y2: floor }, svg);
  const step = Math.max(roundStep(mostSteps, 8), 1);
  for (let i = step; i <= mostSteps; i += step) {
    make("text", { x: memory.x(i), y: floor + 16, "text-anchor": "middle" }, svg, String(i));
  }
  const middle = (margin.left + width - margin.right) / 2;
  make("text", { x: middle, y: floor + 36, "text-anchor": "middle" }, svg, "steps: the nodes of the graphs, in the order they run in");
  const border = memory.x(run.forward);
  make("line", { class: "divide", x1: border, x2: border, y1: margin.top - 14, y2: floor }, svg);
  make("text", { x: border - 6, y: margin.top - 6, "text-anchor": "end" }, svg, "forward");
  make("text", { x: border + 6, y: margin.top - 6 }, svg, "backward");
}

function drawMemory() {
  const run = runs[state.run];
  const width = Math.max(memory.place.clientWidth, 320);
  const height = Math.round(Math.min(460, Math.max(280, width * 0.42)));
  memory.x = (step) => margin.left + (step / mostSteps) * (width - margin.left - margin.right);
  memory.y = (bytes) => height - margin.bottom - (bytes / mostBytes) * (height - margin.top - margin.bottom);
  memory.place.replaceChildren();
  memory.svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, memory.place);
  drawAxes(memory.svg, width, height, run);
  let low = run.totals.map(() => 0);
  for (const group of run.groups[state.mode]) {
    const high = low.map((bytes, c) => bytes + group.bytes[c]);
    if (group.bytes.some((bytes) => bytes > 0)) {
      const edge = state.mode === "layers" ? " edge" : "";
      make("path", { class: `band fill-${group.fill}${edge}`, d: band(run, 0, low, high) }, memory.svg);
    }
    low = high;
  }
  runs.forEach((other, i) => {
    if (i !== state.run) make("path", { class: "before", d: line(other, other.totals) }, memory.svg);
  });
  drawPeak(run, width);
  make("path", { class: "pointed", id: "pointed" }, memory.svg);
  make("line", { class: "cursor", id: "cursor", y1: margin.top, y2: height - margin.bottom }, memory.svg);
  drawLegend(run);
  point();
}

function drawPeak(run, width) {
  const [left] = edges(run, run.peak);
  const anchor = left > width * 0.7 ? "end" : left < width * 0.3 ? "start" : "middle";
  const y = memory.y(run.totals[run.peak]) - 6;
  make("text", { class: "strong", x: left, y, "text-anchor": anchor }, memory.svg, `peak ${bytesText(run.totals[run.peak])}`);
}

function drawLegend(run) {
  const place = find("memory-legend");
  place.replaceChildren();
  const sort = (fill) => fill.split("-")[0];
  const used = new Set(run.groups[state.mode].map((group) => sort(group.fill)));
  const names = state.mode === "kinds"
    ? kinds.map((kind) => [kind.fill, kind.name])
    : [["keep-1", "kept layers"], ["recompute-1", "recomputed layers"], ["outside", "outside the layers"]];
  for (const [fill, name] of names.filter(([fill]) => used.has(sort(fill)))) {
    const item = make("li", {}, place);
    make("span", { class: `swatch fill-${fill}` }, item);
    item.append(name);
  }
  for (const other of runs.filter((_, i) => i !== state.run)) {
    const item = make("li", {}, place);
    const sample = make("svg", { width: 26, height: 10, "aria-hidden": "true" }, item);
    make("path", { class: "before", d: "M0 5H26", style: "fill:none;stroke:var(--before);stroke-dasharray:5 3" }, sample);
    item.append(`all, with ${other.name}`);
  }
}

// ---- what is pointed at ---------------------------------------------------------------------------------------------

function treatment(run, entry) {
  const layer = run.layers[entry.value.layers];
  const words = [layer.name ? `${layer.treatment} ${layer.name}` : "outside the layers"];
  if (entry.value.offloaded) words.push("offloaded");
  return words.join(", ");
}

// The outline of an entry over all columns at which it is in memory.
function highlight(run, entry) {
  if (!entry) return "";
  const { value, group } = entry;
  if (!value) return band(run, state.column, [entry.low], [entry.high]);
  const groups = run.groups[state.mode];
  const low = [];
  for (let c = value.first; c <= value.last; c += 1) {
    let bytes = 0;
    for (const below of groups.slice(0, groups.indexOf(group))) bytes += below.bytes[c];
    for (const other of group.values) {
      if (other === value) break;
      if (other.first <= c && c <= other.last) bytes += other.bytes;
    }
    low.push(bytes);
  }
  return band(run, value.first, low, low.map((bytes) => bytes + value.bytes));
}

function point() {
  const run = runs[state.run];
  const { column, entry } = state;
  const [left, right] = edges(run, column);
  const step = run.at[column];
  const module = run.texts[run.modules[column]];
  const cursor = find("cursor");
  cursor.setAttribute("x1", (left + right) / 2);
  cursor.setAttribute("x2", (left + right) / 2);
  find("pointed").setAttribute("d", highlight(run, entry));
  const value = entry && entry.value;
  const texts = {
    moment: `step ${step + 1} of ${run.steps}, ${step < run.forward ? "forward" : "backward"}${module ? ` of ${module}` : ""}`,
    total: bytesText(run.totals[column]),
    value: value ? value.name : entry ? `smaller ones (${entry.group.name})` : "",
    bytes: entry ? bytesText(entry.high - entry.low) : "",
    kind: value ? kinds[value.kinds].name : "",
    treatment: value ? treatment(run, entry) : "",
    module: value ? value.module || "unknown" : "",
    source: value ? value.source || "unknown" : "",
  };
  for (const [name, text] of Object.entries(texts)) find(`at-${name}`).textContent = text || "–";
}

function goTo(column, choose) {
  const run = runs[state.run];
  state.column = Math.min(Math.max(column, 0), run.at.length - 1);
  state.entry = choose(stack(run, state.mode, state.column)) || null;
  point();
}

// Of entries the one with the most bytes; a single value rather than a sum of several.
function largest(entries) {
  const values = entries.filter((entry) => entry.value);
  return (values.length ? values : entries).reduce((a, b) => (a && a.high - a.low >= b.high - b.low ? a : b), null);
}

const sameValue = (value) => (entries) => entries.find((entry) => entry.value === value) || largest(entries);

function pointerMoved(event) {
  const run = runs[state.run];
  const box = memory.svg.getBoundingClientRect();
  const x = event.clientX - box.left;
  const y = event.clientY - box.top;
  if (x < margin.left || x > memory.x(run.steps)) return;
  let column = run.starts.findIndex((start) => memory.x(start) > x) - 1;
  if (column === -2) column = run.starts.length - 1;
  goTo(column, (entries) => entries.find((entry) => memory.y(entry.high) <= y && y < memory.y(entry.low)));
}

function keyPressed(event) {
  const run = runs[state.run];
  const value = state.entry && state.entry.value;
  const across = { ArrowLeft: state.column - 1, ArrowRight: state.column + 1, Home: 0, End: run.at.length - 1, p: run.peak };
  const along = { ArrowUp: 1, ArrowDown: -1 };
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key.toLowerCase() === "p") {
    goTo(run.peak, largest);
  } else if (event.key in across) {
    goTo(across[event.key], value ? sameValue(value) : largest);
  } else if (event.key in along) {
    goTo(state.column, (entries) => {
      const here = entries.findIndex((e) => state.entry && e.low === state.entry.low && e.value === state.entry.value);
      return entries[Math.min(Math.max(here + along[event.key], 0), entries.length - 1)];
    });
  } else {
    return;
  }
  event.preventDefault();
}
