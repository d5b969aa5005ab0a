// The picture of the settings.

function costText(cost) {
  return data.cost === "predicted time" ? `${+cost.toPrecision(3)} s` : `${+(100 * cost).toFixed(1)} %`;
}

function dot(parent, x, y, row) {
  const shape = row.offload
    ? make("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }, parent)
    : make("circle", { cx: x, cy: y, r: 5 }, parent);
  shape.setAttribute("class", `dot${row.frontier ? " frontier" : ""}`);
  if (row.planned) make("circle", { class: "ring", cx: x, cy: y, r: 9 }, parent);
  return shape;
}

function drawSettings() {
  const place = find("settings");
  const width = Math.max(place.clientWidth, 320);
  const height = Math.round(Math.min(400, Math.max(260, width * 0.36)));
  const mostCost = Math.max(...data.settings.map((row) => row.cost)) * 1.12 || 1;
  const mostPeak = Math.max(...data.settings.map((row) => row.peak)) * 1.12 || 1;
  const x = (cost) => margin.left + 14 + (cost / mostCost) * (width - margin.left - margin.right - 14);
  const y = (bytes) => height - margin.bottom - (bytes / mostPeak) * (height - margin.top - margin.bottom);
  place.replaceChildren();
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, place);
  for (const mark of bytesMarks(mostPeak)) {
    make("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(mark.at), y2: y(mark.at) }, svg);
    make("text", { x: margin.left - 8, y: y(mark.at) + 4, "text-anchor": "end" }, svg, mark.text);
  }
  const floor = height - margin.bottom;
  make("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: floor, y2: floor }, svg);
  const step = roundStep(mostCost, 6);
  for (let i = 0; i * step <= mostCost; i += 1) {
    make("text", { x: x(i * step), y: floor + 16, "text-anchor": "middle" }, svg, costText(i * step));
  }
  const middle = (margin.left + width - margin.right) / 2;
  make("text", { x: middle, y: floor + 36, "text-anchor": "middle" }, svg, data.costLabel);
  make("text", { x: margin.left, y: 12 }, svg, "peak memory");
  const best = data.settings.filter((row) => row.frontier).sort((a, b) => a.cost - b.cost);
  make("path", { class: "frontier-line", d: `M${best.map((row) => `${x(row.cost)} ${y(row.peak)}`).join("L")}` }, svg);
  labelled(svg, data.settings.map((row) => ({ row, x: x(row.cost), y: y(row.peak) })), width);
  drawSettingsLegend();
}

// Dots, and beside them their names; dots in one place share a label, and labels make room for each other.
function labelled(svg, dots, width) {
  const labels = [];
  for (const each of dots) {
    const shape = dot(svg, each.x, each.y, each.row);
    make("title", {}, shape, `${each.row.name}: ${bytesText(each.row.peak)}, ${costText(each.row.cost)}`);
    const here = labels.find((label) => Math.hypot(label.x - each.x, label.y - each.y) < 7);
    if (here) here.names.push(each.row.name);
    else labels.push({ x: each.x, y: each.y, names: [each.row.name] });
  }
  const taken = [];
  for (const label of labels.sort((a, b) => a.y - b.y)) {
    const text = make("text", { class: "name" }, svg, label.names.join(" / "));
    const isLeft = label.x + 10 + text.getComputedTextLength() > width - 4;
    text.setAttribute("x", isLeft ? label.x - 10 : label.x + 10);
    text.setAttribute("y", isLeft ? label.y + 18 : label.y - 8);
    text.setAttribute("text-anchor", isLeft ? "end" : "start");
    const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3;
    for (let tries = 0; tries < 12 && taken.some((box) => meets(box, text.getBoundingClientRect())); tries += 1) {
      text.setAttribute("y", Number(text.getAttribute("y")) + 7);
    }
    taken.push(text.getBoundingClientRect());
  }
}

function drawSettingsLegend() {
  const place = find("settings-legend");
  place.replaceChildren();
  const samples = [
    ["on the frontier", { frontier: true }], ["not on it", {}], ["with offload", { offload: true }],
    ["planned", { planned: true, frontier: true }],
  ];
  for (const [name, row] of samples) {
    const item = make("li", { class: "chart" }, place);
    const sample = make("svg", { width: 20, height: 20, "aria-hidden": "true", style: "display:inline-block;width:20px" }, item);
    dot(sample, 10, 10, row);
    item.append(name);
  }
}
