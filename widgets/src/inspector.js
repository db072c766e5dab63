// The inspector's module: one closure per model, shared by all of its views.

import { openChannel } from "./channel.js";
import { Desk } from "./desk.js";
import { h } from "./looks.js";
import inspectorStyle from "./inspector.css";
import style from "./style.css";

const DEAF = "The kernel does not answer: it is busy with a cell, or gone.";

export default () => {
  /** @type {import("./channel.js").Ask} */
  let ask;
  let deaf = false;
  /** @type {Set<() => void>} */
  const views = new Set();

  function initialize({ model }) {
    const channel = openChannel(model, {
      deafened: (value) => {
        deaf = value;
        views.forEach((view) => view());
      },
    });
    ask = channel.ask;
    return () => channel.close();
  }

  function render({ model, el }) {
    const root = h("div", { class: "xl-root xl-inspector", "data-lm-suppress-shortcuts": "true" });
    const note = h("p", { class: "xl-bad", role: "status", hidden: true }, DEAF);
    el.append(h("style", {}, style + inspectorStyle), note, root);
    const desk = new Desk(root, model.get("setup"), ask);
    const hear = () => (note.hidden = !deaf);
    hear();
    views.add(hear);
    return () => {
      views.delete(hear);
      desk.destroy();
    };
  }

  return { initialize, render };
};
