// Builds the studio into serving/api/http/studio. `--check` compares with what is committed instead of writing it.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "serving", "api", "http", "studio");
const swagger = join(here, "node_modules", "swagger-ui-dist");

const bundled = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: "out",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  write: false,
});
const files = new Map(bundled.outputFiles.map((file) => [file.path.split("/").pop(), file.text]));
for (const name of ["index.html", "docs.html", "icon.svg"]) files.set(name, await readFile(join(here, "src", name), "utf8"));
const initialise = await readFile(join(here, "src", "docs.js"), "utf8");
const viewer = await readFile(join(swagger, "swagger-ui-bundle.js"), "utf8");
files.set("docs.js", `${viewer.replace(/\/\/# sourceMappingURL=.*\s*$/, "")}\n${initialise}`);
files.set("docs.css", `${(await readFile(join(swagger, "swagger-ui.css"), "utf8")).replace(/\/\*# sourceMappingURL=.*?\*\//, "")}\n${await readFile(join(here, "src", "docs.css"), "utf8")}`);
files.set("licences.txt", [
  "This folder is built from studio/ and holds other people's work:",
  `preact, in app.js:\n\n${await readFile(join(here, "node_modules", "preact", "LICENSE"), "utf8")}`,
  `swagger-ui, in docs.js and docs.css, under the Apache License 2.0 (the project's own LICENSE has its text):\n\n${await readFile(join(swagger, "NOTICE"), "utf8")}`,
  await readFile(join(swagger, "swagger-ui-bundle.js.LICENSE.txt"), "utf8"),
].join("\n\n"));

const digest = (text) => createHash("sha256").update(text).digest("hex");
let different = 0;
await mkdir(target, { recursive: true });
for (const [name, text] of files) {
  const path = join(target, name);
  if (!process.argv.includes("--check")) await writeFile(path, text);
  else if (digest(await readFile(path, "utf8").catch(() => "")) !== digest(text)) {
    console.error(`serving/api/http/studio/${name} is not what studio/ gives: run 'make studio'.`);
    different += 1;
  }
}
if (different) process.exit(1);
console.log(process.argv.includes("--check") ? "The built studio is current." : `Wrote ${files.size} files to ${target}`);
