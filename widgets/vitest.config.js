import { defineConfig } from "vitest/config";

export default defineConfig({
  test: { environment: "happy-dom", include: ["tests/**/*.test.js"] },
  plugins: [
    {
      // The bundler hands style sheets over as text.
      name: "css-as-text",
      enforce: "pre",
      load(id) {
        return id.split("?")[0].endsWith(".css") ? "export default '';" : null;
      },
    },
  ],
});
