// What a page without a kernel gives a widget's module in place of a model.

import { answererOf } from "./offline.js";

const snapshot = JSON.parse(document.getElementById("snapshot").textContent);
const code = Uint8Array.from(atob(document.getElementById("bundle").textContent), (c) => c.charCodeAt(0));
const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
const answer = snapshot.inspector ? answererOf(snapshot.inspector) : null;
const values = { snapshot, group: "export", setup: snapshot.inspector?.setup };
/** @type {Set<(content: any, buffers: DataView[]) => void>} */
const listeners = new Set();
const model = {
  get: (name) => values[name],
  on: (event, listener) => event === "msg:custom" && listeners.add(listener),
  off: (event, listener) => listeners.delete(listener),
  send(content) {
    if (!answer) return;
    const { content: said, buffers } = answer(content);
    queueMicrotask(() => listeners.forEach((listener) => listener({ kind: "answer", id: content.id, ...said }, buffers)));
  },
  set() {},
  save_changes() {},
};

import(/* a bundle that lies in this page */ url).then(({ default: make }) => {
  const { initialize, render } = make();
  initialize({ model });
  render({ model, el: document.getElementById("view") });
  URL.revokeObjectURL(url);
});
