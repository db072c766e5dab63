// What a page without a kernel gives the dashboard's module in place of a model.

const snapshot = JSON.parse(document.getElementById("snapshot").textContent);
const code = Uint8Array.from(atob(document.getElementById("bundle").textContent), (c) => c.charCodeAt(0));
const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
const values = { snapshot, group: "export" };
const model = { get: (name) => values[name], on() {}, off() {}, send() {}, set() {}, save_changes() {} };

import(/* a bundle that lies in this page */ url).then(({ default: make }) => {
  const { initialize, render } = make();
  initialize({ model });
  render({ model, el: document.getElementById("view") });
  URL.revokeObjectURL(url);
});
