"use strict";

// Draws the two pictures of the page from the data in it. Text of the model becomes text nodes only, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const kinds = [
  { name: "saved for backward", fill: "saved" },
  { name: "recomputed", fill: "recomputed" },
  { name: "parameters' gradients", fill: "gradients" },
  { name: "other", fill: "other" },
];
const margin = { left: 84, right: 20, top: 26, bottom: 44 };

const find = (id) => document.getElementById(id);

function make(name, attributes, parent, text) {
  const isDrawn = parent.namespaceURI.endsWith("svg") || name === "svg";
  const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const units = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytesText(count) {
  let unit = 0;
  while (count >= (unit === 0 ? 1024 : 1023.95) && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count : count.toFixed(1)} ${units[unit]}`;
}

// A round step for about `wanted` marks up to `most`: one of the factors times a power of ten.
function roundStep(most, wanted, factors = [1, 2, 5, 10]) {
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * factors.find((factor) => factor * power >= rough * 0.999);
}

// Marks of a scale of bytes, in one unit.
function bytesMarks(most) {
  let unit = 0;
  while (most / 1024 ** (unit + 1) >= 1 && unit < units.length - 1) unit += 1;
  const step = Math.max(roundStep(most / 1024 ** unit, 5, [1, 2, 2.5, 5, 10]), unit === 0 ? 1 : 0);
  const marks = [];
  for (let i = 0; i * step * 1024 ** unit <= most; i += 1) {
    marks.push({ at: i * step * 1024 ** unit, text: i === 0 ? "0" : `${+(i * step).toFixed(6)} ${units[unit]}` });
  }
  return marks;
}

function sums(differences) {
  let level = 0;
  return differences.map((difference) => (level += difference));
}

// ---- the memory of one way to run the step --------------------------------------------------------------------------

// Layers of one treatment have one colour, in two shades by turns.
function layerFills(layers) {
  const number = {};
  return layers.map(({ name, treatment }) => {
    if (name === "") return "outside";
    number[treatment] = (number[treatment] || 0) + 1;
    return `${treatment}-${1 + (number[treatment] % 2)}`;
  });
}

function readRun(run) {
  const fills = layerFills(run.layers);
  const values = run.values.map(([name, bytes, kind, layer, module, source, first, last, offloaded]) => ({
    name: run.texts[name], bytes, kinds: kind, layers: layer, first, last, offloaded: offloaded === 1,
    module: run.texts[module], source: run.texts[source],
  }));
  values.sort((a, b) => a.first - b.first || b.last - a.last);
  const groups = {
    kinds: kinds.map((kind, i) => ({ ...kind, index: i, bytes: sums(run.kinds[i]) })),
    layers: run.layers.map((layer, i) => ({
      name: layer.name || "outside the layers", fill: fills[i], index: i, bytes: sums(layer.bytes),
    })),
  };
  groups.layers.push(groups.layers.shift()); // what is outside lies on top
  for (const mode of Object.keys(groups)) {
    for (const group of groups[mode]) group.values = values.filter((value) => value[mode] === group.index);
  }
  const totals = run.at.map((_, c) => groups.kinds.reduce((sum, group) => sum + group.bytes[c], 0));
  return { ...run, groups, totals, peak: totals.indexOf(Math.max(...totals)) };
}

// What is in memory at a column, from below: values, and of each group the sum of the values that are not listed.
function stack(run, mode, column) {
  const entries = [];
  let low = 0;
  for (const group of run.groups[mode]) {
    const top = low + group.bytes[column];
    for (const value of group.values) {
      if (value.first <= column && column <= value.last) {
        entries.push({ group, value, low, high: low + value.bytes });
        low += value.bytes;
      }
    }
    if (top > low) entries.push({ group, value: null, low, high: top });
    low = top;
  }
  return entries;
}

const runs = data.runs.map(readRun);
const mostBytes = Math.max(...runs.flatMap((run) => run.totals)) * 1.06 || 1;
const mostSteps = Math.max(...runs.map((run) => run.steps));
const state = { run: runs.length - 1, mode: "kinds", column: 0, entry: null };
