// What the page asks its server. The token lives in this module's memory, and nowhere else.

export type Fate = "SEARCH_FATE_LIVE" | "SEARCH_FATE_PRUNED" | "SEARCH_FATE_FINISHED";
export interface Candidate {
  id?: number; piece?: string; parent?: number; score?: number; normalized_score?: number; fate: Fate; finish_reason?: string;
}
export interface Step { number?: number; candidates: Candidate[]; forced?: boolean; part?: number }
export interface End { step?: number; candidate?: number }
export interface Trace {
  beam_size: number; samples?: boolean; length_penalty?: number; steps?: Step[]; hypotheses?: End[]; truncated?: boolean;
}
export interface Token { id?: number; piece?: string; log_prob?: number; top?: Token[] }
export interface Hypothesis {
  text?: string; score?: number; tokens?: Token[]; token_log_probs?: number[]; alignment?: { weights: number[] }[]; finish_reason?: string;
}
export interface Translation {
  hypotheses: Hypothesis[]; source_tokens?: number; source?: Token[]; search_traces?: Trace[];
  timings?: { queue_ms?: number; encode_ms?: number; decode_ms?: number };
}
export interface Model {
  name: string; version: string; default?: boolean; task: "translate" | "generate" | "classify" | "embed"; labels?: string[];
  source_languages?: string[]; target_languages?: string[]; language_tags?: Record<string, string>;
  default_source_language?: string | null; default_target_language?: string | null; feature_width?: number; chat?: boolean;
  limits?: { max_source_length: number; max_target_length: number; max_beam_size: number };
  defaults?: Record<string, any>;
}
export interface Listed { name: string; version: string; state: string; reason: string }

let token = "";
const watchers = new Set<() => void>();
export const hasToken = () => token !== "";
export function setToken(value: string) { token = value.trim(); watchers.forEach((call) => call()); }
export function onToken(call: () => void) { watchers.add(call); return () => { watchers.delete(call); }; }

export class ApiError extends Error {
  constructor(public status: number, message: string) { super(message); }
  get wantsToken() { return this.status === 401 || this.status === 403; }
}

function headers(more: Record<string, string> = {}) {
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

async function failure(response: Response) {
  let message = `the server answered with ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* no JSON: the status must do */ }
  return new ApiError(response.status, message);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await fetch(path, { headers: headers(), signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const response = await fetch(path, { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Server-sent events of a streaming call, as they come. */
export async function* stream<T>(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<T> {
  const response = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: headers({ "content-type": "application/json", accept: "text/event-stream" }),
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop()!;
      for (const event of events) {
        const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
        if (event.startsWith("event: error")) throw new ApiError(500, data.error.message);
        if (!event.startsWith("event: end")) yield data as T;
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}
