// The API key: in this tab's own storage, and in a header, and nowhere else.

import { byId } from "./dom.js";

const NAME = "bouquet-key";

export const headers = () => {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
};

export const known = () => sessionStorage.getItem(NAME) !== null;

export function ask(refused) {
  const form = byId("key");
  form.hidden = false;
  if (refused && known()) byId("key-note").textContent = "The server does not know this key. Try another one.";
}

export function onKey(use) {
  if (known()) byId("key").hidden = false;
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = byId("key-field");
    const key = field.value.trim();
    if (!key) return;
    sessionStorage.setItem(NAME, key);
    field.value = "";
    byId("key-note").textContent = "A key is in use. It stays in this tab until the tab is closed.";
    use();
  });
}
