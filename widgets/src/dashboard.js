// The dashboard's module: one closure per model, shared by all of its views.

import uplotStyle from "uplot/dist/uPlot.min.css";
import { Board } from "./board.js";
import { MOST_ROWS, Run } from "./data.js";
import { forget, hubOf } from "./hub.js";
import { h } from "./looks.js";
import style from "./style.css";

export default () => {
  /** @type {{runs: Run[], panels: any[]}} */
  const store = { runs: [], panels: [] };
  /** @type {Set<Board>} */
  const boards = new Set();
  /** @type {Record<string, number | null>} */
  let knobs = {};
  let asked = false;

  const draw = () => boards.forEach((board) => board.draw());

  function take(snapshot) {
    if (!snapshot?.runs) return;
    asked = false;
    store.runs = snapshot.runs.map((run) => new Run(run));
    store.panels = snapshot.panels;
    knobs = snapshot.knobs ?? {};
    draw();
  }

  function initialize({ model }) {
    const hub = hubOf(model.get("group"));
    const tell = () => {
      const [first] = store.runs;
      if (first) hub.tell("state", { status: first.status, knobs, name: first.name });
    };
    const again = () => {
      if (asked) return;
      asked = true;
      hub.ask({ kind: "again" });
    };
    const changed = () => {
      take(model.get("snapshot"));
      tell();
    };
    const heard = (message, buffers) => {
      if (message?.kind !== "delta") return;
      if (message.knobs) knobs = message.knobs;
      if (message.panels) store.panels = message.panels;
      let at = 0;
      for (const news of message.runs) {
        const run = store.runs[news.run];
        const whole = run?.apply(news, news.rows ? buffers[at] : undefined);
        if (news.rows) at += 1;
        if (!whole || run.length > MOST_ROWS) again();
      }
      tell();
      draw();
    };
    // What came before this module was loaded, or while the page was away, is asked for.
    const stop = hub.on("heads", (heads) => {
      const behind = heads.some(([step, event], r) => step > (store.runs[r]?.last ?? 0) || event > (store.runs[r]?.lastEvent ?? 0));
      if (behind) again();
    });
    changed();
    model.on("change:snapshot", changed);
    model.on("msg:custom", heard);
    return () => {
      stop();
      model.off("change:snapshot", changed);
      model.off("msg:custom", heard);
      forget(model.get("group"));
    };
  }

  function render({ model, el }) {
    const root = h("div", { class: "xl-root xl-dashboard", "data-lm-suppress-shortcuts": "true" });
    el.append(h("style", {}, uplotStyle + style), root);
    const board = new Board(root, store, (content) => hubOf(model.get("group")).ask(content));
    boards.add(board);
    return () => {
      boards.delete(board);
      board.destroy();
    };
  }

  return { initialize, render };
};
