// The module of the browser of checkpoints: see xorl_lab/widgets/shelf.py.

import { openChannel } from "./channel.js";
import { Lineage } from "./lineage.js";
import { h } from "./looks.js";
import { Browser } from "./shelfview.js";
import shelfStyle from "./shelf.css";
import style from "./style.css";

/** Milliseconds between looks at the disk while the browser is in sight. */
const LOOK = 4000;

export default () => {
  /** @type {{lineage: Lineage, mark: string, error: string, deaf: boolean}} */
  const state = { lineage: null, mark: "", error: "", deaf: false };
  /** @type {Set<Browser>} */
  const views = new Set();
  let ask;
  let looking = null;
  const draw = () => views.forEach((view) => view.draw());

  function take({ tree, mark, error }) {
    state.error = error ?? "";
    if (mark) state.mark = mark;
    if (tree) state.lineage = new Lineage(tree);
  }

  /** Ask what there is; one question at a time. */
  function look() {
    looking ??= ask({ kind: "tree", seen: state.mark }).then(({ content }) => {
      looking = null;
      take(content);
      draw();
    });
    return looking;
  }

  function initialize({ model }) {
    take(model.get("first"));
    const channel = openChannel(model, {
      greeted: () => look(),
      deafened: (deaf) => {
        state.deaf = deaf;
        draw();
      },
    });
    ask = channel.ask;
    const timer = setInterval(() => {
      const seen = document.visibilityState === "visible" && [...views].some((view) => view.inSight);
      if (seen && !looking) look();
    }, LOOK);
    return () => {
      clearInterval(timer);
      channel.close();
    };
  }

  function render({ el }) {
    const root = h("div", { class: "xl-root xl-shelf", "data-lm-suppress-shortcuts": "true" });
    // What bubbles up to the notebook is swallowed there: Enter in a text, Enter on a button.
    root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(h("style", {}, style + shelfStyle), root);
    const view = new Browser(root, state, (content) => ask(content), look);
    views.add(view);
    return () => {
      views.delete(view);
      view.destroy();
    };
  }

  return { initialize, render };
};
