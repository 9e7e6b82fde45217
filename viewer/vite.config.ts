import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// `npm run build` writes the files that the Python package serves and puts into reports; they are committed.
export default defineConfig({
  plugins: [svelte()],
  base: "./",
  build: {
    outDir: "../rl_vlm/view/page",
    emptyOutDir: true,
    license: { fileName: "LICENSES.md" },
    modulePreload: false,
    cssCodeSplit: false,
    chunkSizeWarningLimit: 1000,
    rolldownOptions: {
      output: { codeSplitting: false, entryFileNames: "app.js", assetFileNames: "app.[ext]" },
    },
  },
});
