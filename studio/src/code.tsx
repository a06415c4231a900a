// The current request as others would send it.
import { useState } from "preact/hooks";
import { hasToken } from "./api.ts";
import { Card, Copy, useRoving } from "./ui.tsx";

export interface Asked { path: "v1/translate" | "v1/generate" | "v1/score" | "v1/classify" | "v1/embed"; body: Record<string, any> }
const METHODS = { "v1/translate": "Translate", "v1/generate": "GenerateOnce", "v1/score": "Score", "v1/classify": "Classify", "v1/embed": "Embed" };

/** Readable, and numbers in one line. */
const json = (body: unknown) => JSON.stringify(body, null, 2).replace(/\[[\s\d.,eE+-]+\]/g, (found) => found.replace(/\s+/g, " "));

const shell = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;

function python(value: unknown): string {
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${python(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const ENUMS: Record<string, unknown> = {
  EARLY_STOPPING_TRUE: true, EARLY_STOPPING_FALSE: false, EARLY_STOPPING_NEVER: "never",
  POOLING_LAST: "last", POOLING_MEAN: "mean", POOLING_MAX: "max", POOLING_ATTENTION: "attention",
};

function input(item: any): string {
  if (item.features) {
    const { columns, values } = item.features;
    const rows = Array.from({ length: values.length / columns }, (_, row) => values.slice(row * columns, (row + 1) * columns));
    return `Features(${python(rows)})`;
  }
  return python(item.text);
}

/** The same through the Python client. */
export function asPython({ path, body }: Asked): string {
  const options = { model: body.model, ...body.options, ...Object.fromEntries(["source_language", "target_language", "top_k", "truncate", "pooling", "normalize"].filter((key) => key in body).map((key) => [key, body[key]])) };
  const named = Object.entries(options).filter(([, value]) => value !== undefined && value !== "")
    .map(([key, value]) => `    ${key}=${python(typeof value === "string" && value in ENUMS ? ENUMS[value] : key === "seed" ? Number(value) : value)},\n`).join("");
  const many = (items: any[]) => (items.length === 1 ? input(items[0]) : `[${items.map(input).join(", ")}]`);
  const method = path === "v1/generate" ? (body.chat ? "chat" : "generate") : path.slice(3);
  const first = path === "v1/generate" ? python(body.chat ? body.chat.messages : body.text)
    : path === "v1/score" ? many(body.texts) + (body.sources ? `,\n    source=${many(body.sources)}` : "") : many(body.inputs);
  const attribute = { translate: ".text", generate: ".text", chat: ".text", score: ".perplexity", classify: ".label", embed: ".values" }[method];
  const list = (body.inputs ?? body.texts ?? [0]).length > 1;
  const features = (body.inputs ?? []).some((each: any) => each.features);
  return `from beamline import Client\n${features ? "from beamline.types import Features\n" : ""}\nclient = Client("${location.hostname || "127.0.0.1"}:8001"${hasToken() ? ', token="..."' : ""})\nanswer = client.${method}(\n    ${first},\n${named})\nprint(${list ? `[each${attribute} for each in answer]` : `answer${attribute}`})\n`;
}

export function asCurl({ path, body }: Asked, token = hasToken()): string {
  return `curl -s ${location.origin}/${path} \\\n${token ? '  -H "authorization: Bearer $TOKEN" \\\n' : ""}  -H 'content-type: application/json' \\\n  -d ${shell(json(body))}\n`;
}

export function asGrpcurl({ path, body }: Asked, token = hasToken()): string {
  const secure = location.protocol === "https:";
  return `grpcurl ${secure ? "" : "-plaintext "}${token ? '-H "authorization: Bearer $TOKEN" ' : ""}\\\n  -d ${shell(json(body))} \\\n  ${location.hostname || "127.0.0.1"}:8001 beamline.v1.Inference/${METHODS[path]}\n`;
}

const KINDS = ["curl", "grpcurl", "Python"] as const;

export function AsCode({ asked }: { asked: Asked }) {
  const [kind, setKind] = useState<(typeof KINDS)[number]>("curl");
  const { row, tabIndex } = useRoving(KINDS.length);
  const code = kind === "curl" ? asCurl(asked) : kind === "grpcurl" ? asGrpcurl(asked) : asPython(asked);
  return (
    <Card id="as-code" title="As code" hint="This request, as you would send it. gRPC listens on 8001 unless the server was told otherwise."
      tools={<Copy text={code} />}>
      <div class="choices" role="tablist" aria-label="language" {...row}>
        {KINDS.map((each, index) => (
          <button key={each} type="button" role="tab" aria-selected={kind === each} aria-controls="code" tabIndex={tabIndex(index)} onClick={() => setKind(each)} onFocus={() => setKind(each)}>{each}</button>
        ))}
      </div>
      <pre class="code" id="code" role="tabpanel" aria-label={kind} tabIndex={0}><code>{code}</code></pre>
    </Card>
  );
}
