// Requests of this page to the kernel and its answers: see xorl_lab/widgets/channel.py.

/** When to say hello: once JupyterLab has made the kernel's second thread, then until answered. */
const HELLOS = [600, 1500, 3000, 6000];

/**
 * @typedef {(content: Record<string, unknown>) => Promise<{content: any, buffers: DataView[]}>} Ask
 */

/**
 * Opens the channel of a model; call it in `initialize`, once per model.
 * @param {any} model
 * @param {{greeted?: (answer: any) => void, deafened?: (deaf: boolean) => void}} [listen]
 *   `greeted`: the kernel answered a hello, at first and whenever the page is looked at again;
 *   `deafened`: the kernel does not answer, or answers again
 * @returns {{ask: Ask, close: () => void}}
 */
export function openChannel(model, { greeted = () => {}, deafened = () => {} } = {}) {
  const open = new Map();
  let count = 0;
  let deaf = false;
  const heard = (content, buffers) => {
    if (content?.kind !== "answer") return;
    if (deaf) deafened((deaf = false));
    open.get(content.id)?.({ content, buffers: buffers ?? [] });
    open.delete(content.id);
  };
  model.on("msg:custom", heard);
  // An id of its own: every page that shows this model hears every answer.
  const page = Math.random().toString(36).slice(2);
  const send = (content) =>
    new Promise((answer) => {
      count += 1;
      const id = `${page}-${count}`;
      open.set(id, answer);
      model.send({ ...content, id });
    });
  // What is asked before the kernel's second thread is there would wait for the end of the cell.
  let ready;
  const handshake = new Promise((go) => (ready = go));
  let answered = false;
  const hello = async () => {
    const { content } = await send({ kind: "hello" });
    answered = true;
    ready();
    greeted(content);
  };
  const timers = HELLOS.map((ms, i) =>
    setTimeout(() => {
      if (answered) return;
      hello();
      if (i < HELLOS.length - 1) return;
      deafened((deaf = true));
      ready();
    }, ms),
  );
  const shown = () => document.visibilityState === "visible" && hello();
  document.addEventListener("visibilitychange", shown);
  addEventListener("online", shown);
  return {
    ask: async (content) => {
      await handshake;
      return send(content);
    },
    close() {
      timers.forEach(clearTimeout);
      document.removeEventListener("visibilitychange", shown);
      removeEventListener("online", shown);
      model.off("msg:custom", heard);
    },
  };
}
