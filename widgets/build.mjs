// Bundles the front end into the Python package.  Run by `npm run build`, which hatch_build.py calls.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "xorl_lab", "widgets", "static");
const shared = {
  bundle: true,
  minify: true,
  target: "es2021",
  loader: { ".css": "text" },
  legalComments: "none",
  logLevel: "warning",
};
const notice = "/* xorl_lab, Apache-2.0; contains uPlot, (c) Leon Sorokin, MIT licence */";

/** SHA-256 over what the bundle is made of, as hatch_build.py computes it. */
export function sourcesHash() {
  const files = ["build.mjs", "package.json", "package-lock.json"];
  files.push(...readdirSync(join(here, "src")).map((name) => `src/${name}`));
  const hash = createHash("sha256");
  for (const name of files.sort()) {
    const content = createHash("sha256").update(readFileSync(join(here, name))).digest("hex");
    hash.update(`${name} ${content}\n`);
  }
  return hash.digest("hex");
}

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
const entry = (name) => join(here, "src", `${name}.js`);
await build({
  ...shared,
  entryPoints: [entry("dashboard"), entry("controls"), entry("explorer"), entry("inspector"), entry("shelf")],
  outdir: target,
  format: "esm",
  banner: { js: notice },
});
await build({ ...shared, entryPoints: [entry("host")], outdir: target, format: "iife" });
writeFileSync(join(target, "sources.sha256"), `${sourcesHash()}\n`);
