// h() describes a node; patch() makes the document so, and keeps the nodes that are there, with focus and selection.
const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "path", "line", "text", "polyline", "desc", "title"]);

export const h = (tag, attributes, ...children) => ({tag, attributes: attributes || {}, children});

export function patch(parent, ...wanted) {
  const byKey = new Map();
  for (const node of parent.childNodes) if (node.patchKey !== undefined) byKey.set(node.patchKey, node);
  let next = parent.firstChild;
  for (const want of wanted.flat(Infinity)) {
    if (want === null || want === undefined || want === false) continue;
    const node = typeof want === "object" ? element(want, next, byKey) : text(String(want), next);
    if (node === next) next = node.nextSibling;
    else parent.insertBefore(node, next);
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

function text(content, next) {
  if (!next || next.nodeType !== Node.TEXT_NODE) return document.createTextNode(content);
  if (next.data !== content) next.data = content;
  return next;
}

function element(want, next, byKey) {
  const key = want.attributes.key;
  const fits = (node) => node && node.nodeType === Node.ELEMENT_NODE && node.localName === want.tag && node.patchKey === key;
  const found = key === undefined ? next : byKey.get(key);
  const node = fits(found) ? found : SVG_TAGS.has(want.tag) ? document.createElementNS(SVG, want.tag) : document.createElement(want.tag);
  node.patchKey = key;
  const before = node.patchNames || [];
  node.patchNames = Object.keys(want.attributes).filter((name) => name !== "key");
  for (const name of before) if (!node.patchNames.includes(name)) name.startsWith("on") ? (node[name] = null) : node.removeAttribute(name);
  for (const name of node.patchNames) {
    const value = want.attributes[name];
    if (name.startsWith("on")) node[name] = value;
    else if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
  patch(node, ...want.children);
  return node;
}

export const byId = (id) => document.getElementById(id);

const thousands = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
export const whole = (value) => thousands.format(value);

export function rate(value) {
  return value >= 100 ? whole(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  return seconds < 120 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${(seconds / 60).toFixed(0)} min`;
}

export function bytes(count) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (count < 1000) return `${count < 10 && unit !== "B" ? count.toFixed(1) : count.toFixed(0)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function table(caption, heads, rows) {
  const cells = (tag, values) => values.map((value, index) => {
    const isNumber = heads[index].startsWith("#");
    return h(tag, {class: isNumber ? "number" : null, scope: tag === "th" ? "col" : null}, value);
  });
  return h("table", {"aria-label": caption},
    h("thead", null, h("tr", null, cells("th", heads.map((head) => head.replace("#", ""))))),
    h("tbody", null, rows.map((row) => h("tr", {key: row.key, class: row.chosen ? "chosen" : null}, cells("td", row.cells)))));
}
