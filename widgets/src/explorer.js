// The module of the explorer of losses: see xorl_lab/widgets/explorer.py.

import { openChannel } from "./channel.js";
import { ExplorerView } from "./explorerview.js";
import { h } from "./looks.js";
import explorerStyle from "./explorer.css";
import style from "./style.css";

/**
 * @typedef {{name: string, kind: "number" | "flag" | "choice", default: any, low?: number, high?: number, step?: number, on?: number | null, choices?: string[]}} Field
 * @typedef {{name: string, about: string, formula: string, params: Field[]}} Form
 * @typedef {{kind: "clipped" | "masked", low: number, high: number}} Region
 * @typedef {{loss: string, params: Record<string, any>, token: Record<string, number>, needs: string[], ratios: number[], values: number[], gradients: number[], regions: Region[], mark: Record<string, any>, metrics: Record<string, number>}} Curve
 */

export default () => {
  /** @type {{forms: Form[], curve: Curve, kept: Curve | null, wish: {loss: string, params: Record<string, Record<string, any>>, token: Record<string, any>}, error: string, deaf: boolean, busy: boolean}} */
  const state = { forms: [], curve: null, kept: null, wish: null, error: "", deaf: false, busy: false };
  /** @type {Set<ExplorerView>} */
  const views = new Set();
  let ask;
  let touched = false;
  let again = false;
  const draw = () => views.forEach((view) => view.draw());

  /** What the controls say, out of a curve. @param {Curve} curve */
  function take(curve) {
    state.curve = curve;
    const params = { ...(state.wish?.params ?? {}), [curve.loss]: { ...curve.params } };
    state.wish = { loss: curve.loss, params, token: { ...curve.token } };
  }

  /** Ask for the curve of what the controls say; while one is on its way the newest wish waits. */
  async function want() {
    touched = true;
    if (state.busy) {
      again = true;
      return;
    }
    state.busy = true;
    do {
      again = false;
      const { loss, params, token } = state.wish;
      const { content } = await ask({ kind: "curve", loss, params: params[loss] ?? {}, token });
      state.error = content.error ?? "";
      if (content.curve) state.curve = content.curve;
      // What was left out has its defaults now.
      if (content.curve && !again) state.wish.params[loss] = { ...content.curve.params };
      draw();
    } while (again);
    state.busy = false;
  }

  function initialize({ model }) {
    const { forms, curve } = model.get("first");
    state.forms = forms;
    take(curve);
    const channel = openChannel(model, {
      // A page that was loaded again shows what the kernel was asked last.
      greeted: ({ curve: latest }) => {
        if (touched || !latest) return;
        take(latest);
        draw();
      },
      deafened: (deaf) => {
        state.deaf = deaf;
        draw();
      },
    });
    ask = channel.ask;
    return () => channel.close();
  }

  function render({ el }) {
    const root = h("div", { class: "xl-root xl-explorer", "data-lm-suppress-shortcuts": "true" });
    // What bubbles up to the notebook is swallowed there: Enter in a text, Enter on a button.
    root.addEventListener("keydown", (event) => event.stopPropagation());
    el.append(h("style", {}, style + explorerStyle), root);
    const view = new ExplorerView(root, state, want, draw);
    views.add(view);
    return () => {
      views.delete(view);
      view.destroy();
    };
  }

  return { initialize, render };
};
