// Rendering. A view is a tree of plain objects made by `h`; `render` changes the document to match
// it and touches only what differs, so focus, selection, open <details> and scrolling stay.
//
// Strings become text nodes: no function here takes markup.

const SVG = "http://www.w3.org/2000/svg";
const UNSAFE_URL = /^\s*(?:javascript|vbscript|data(?!:image\/(?:png|jpeg|gif|webp)[;,])):/i;

/** A node: h("p", {class: "note"}, "text", h("b", null, 1)). Null and false are nothing. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, key: props?.key, children: flat(children), dom: null };
}

function flat(children, into = []) {
  for (const child of children) {
    if (Array.isArray(child)) flat(child, into);
    else if (child !== null && typeof child === "object") into.push(child);
    else into.push({ text: child === null || child === undefined || child === false || child === true ? "" : String(child) });
  }
  return into;
}

/** Make the children of an element match these nodes. */
export function render(parent, ...children) {
  const next = flat(children);
  if (!parent.nodes) parent.replaceChildren();
  patchChildren(parent, parent.nodes ?? [], next, parent.namespaceURI === SVG);
  parent.nodes = next;
}

function patchChildren(parent, old, next, inSvg) {
  const keyed = new Map();
  const loose = [];
  for (const node of old) {
    if (node.key !== undefined) keyed.set(node.key, node);
    else loose.push(node);
  }
  let at = 0;
  for (const node of next) {
    let match;
    if (node.key !== undefined) {
      match = keyed.get(node.key);
      if (match?.tag === node.tag) keyed.delete(node.key);
      else match = undefined;
    } else if (at < loose.length && loose[at].tag === node.tag) {
      match = loose[at++];
    } else {
      const later = loose.findIndex((one, index) => index >= at && one.tag === node.tag && node.tag);
      if (later >= 0) [match] = loose.splice(later, 1);
    }
    if (match) patch(match, node, inSvg);
    else create(node, inSvg);
  }
  const kept = new Set(next.map((node) => node.dom));
  for (const node of old) if (!kept.has(node.dom)) remove(node);
  let place = parent.firstChild;
  for (const node of next) {
    if (node.dom === place) place = place.nextSibling;
    else parent.insertBefore(node.dom, place);
  }
}

function create(node, inSvg) {
  if (node.tag === undefined) {
    node.dom = document.createTextNode(node.text);
    return;
  }
  const svg = inSvg || node.tag === "svg";
  node.dom = svg ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.props)) set(node.dom, name, value, undefined);
  patchChildren(node.dom, [], node.children, svg);
  // A select has its value only once its options are there.
  if (node.tag === "select" && "value" in node.props) node.dom.value = node.props.value;
  node.props.ref?.(node.dom);
}

function patch(old, node, inSvg) {
  const dom = (node.dom = old.dom);
  if (node.tag === undefined) {
    if (old.text !== node.text) dom.data = node.text;
    return;
  }
  const svg = inSvg || node.tag === "svg";
  for (const name of Object.keys(old.props)) {
    if (!(name in node.props)) set(dom, name, undefined, old.props[name]);
  }
  for (const [name, value] of Object.entries(node.props)) {
    if (value !== old.props[name]) set(dom, name, value, old.props[name]);
  }
  if (!node.props.own) patchChildren(dom, old.children, node.children, svg);
}

function remove(node) {
  node.dom.remove();
  cleanUp(node);
}

function cleanUp(node) {
  if (node.tag === undefined) return;
  node.props.gone?.(node.dom);
  node.children.forEach(cleanUp);
}

function set(dom, name, value, before) {
  switch (name) {
    case "key": // of `render`
    case "ref": // called with the element when it is made
    case "gone": // called when it is removed
    case "own": // its children are its own business
      return;
    case "value":
    case "checked":
    case "indeterminate":
    case "disabled":
    case "open":
      dom[name] = value ?? (name === "value" ? "" : false);
      return;
    case "style":
      for (const [property, one] of Object.entries(value ?? {})) dom.style.setProperty(property, one);
      return;
  }
  if (name.startsWith("on")) {
    const type = name.slice(2);
    if (before) dom.removeEventListener(type, before);
    if (value) dom.addEventListener(type, value);
  } else if (value === undefined || value === null || value === false) {
    dom.removeAttribute(name);
  } else if ((name === "href" || name === "src") && UNSAFE_URL.test(value)) {
    dom.removeAttribute(name);
  } else {
    dom.setAttribute(name, value === true ? "" : value);
  }
}
