// Elements and their text. Nothing here, or anywhere on the page, reads a string as HTML.

export const byId = (id) => document.getElementById(id);

// properties: of the element; those with a dash are attributes. children: elements or text.
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

// Writing what is there already would still cost a layout.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function drawing(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
