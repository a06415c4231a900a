// A language model's answers as they come, with what else each token might have been; several samples side by side; chat.
import { useEffect, useMemo, useState } from "preact/hooks";
import { stream, type Model, type Step, type Token, type Trace } from "./api.ts";
import { AsCode } from "./code.tsx";
import { isEnd, isLanguage, label, readable } from "./pieces.ts";
import { BeamTree } from "./tree-view.tsx";
import { Card, Confidence, confidence, Copy, Field, given, number, NumberField, percent, Problem, RunButtons, sends, useRoving, useRun } from "./ui.tsx";

interface Reply { index?: number; text?: string; tokens?: Token[]; finish_reason?: string; usage?: Record<string, any>; search_steps?: Step[]; search_trace?: Trace }
interface Answer { text: string; tokens: Token[]; reason?: string }
interface Message { role: string; content: string }
const REASONS: Record<string, string> = { FINISH_REASON_EOS: "ended", FINISH_REASON_LENGTH: "at its limit", FINISH_REASON_STOP: "at a stop string", FINISH_REASON_TIME_LIMIT: "out of time" };

export function Generate({ model, chat }: { model: Model; chat: boolean }) {
  const [text, setText] = useState(chat ? "What is beam search?" : "Once upon a time");
  const [system, setSystem] = useState("");
  const [messages, setMessages] = useState<Message[]>([]);
  const [options, setOptions] = useState<Record<string, string>>({ max_tokens: "60" });
  const [answers, setAnswers] = useState<Answer[]>([]);
  const [steps, setSteps] = useState<Step[]>([]);
  const [trace, setTrace] = useState<Trace | undefined>();
  const [usage, setUsage] = useState<Record<string, any> | null>(null);
  const { running, error, run, stop } = useRun();
  const set = (name: string) => (value: string) => setOptions((old) => ({ ...old, [name]: value }));
  useEffect(() => { setAnswers([]); setSteps([]); setMessages([]); setUsage(null); }, [model.name, chat]);

  const conversation = useMemo(() => [...(system ? [{ role: "system", content: system }] : []), ...messages], [system, messages]);
  const bodyOf = (asked: Message[]) => given({
    model: model.name, version: model.version, text: chat ? undefined : text, chat: chat ? { messages: asked } : undefined,
    options: given({
      max_tokens: number(options.max_tokens ?? ""), n: number(options.n ?? ""), beam_size: number(options.beam_size ?? ""),
      temperature: number(options.temperature ?? ""), top_k: number(options.top_k ?? ""), top_p: number(options.top_p ?? ""), min_p: number(options.min_p ?? ""),
      seed: options.seed, repetition_penalty: number(options.repetition_penalty ?? ""), presence_penalty: number(options.presence_penalty ?? ""),
      frequency_penalty: number(options.frequency_penalty ?? ""), stop: options.stop ? options.stop.split("|") : undefined,
      return_log_probs: true, top_log_probs: 5, return_search_trace: true,
    }),
  });
  const asking = chat ? [...conversation, ...(text.trim() ? [{ role: "user", content: text }] : [])] : [];
  const body = bodyOf(asking);
  const go = () => run(async (signal) => {
    const request = bodyOf(asking);
    setAnswers([]); setSteps([]); setTrace(undefined); setUsage(null);
    const said = text;
    if (chat) { setMessages((old) => [...old, { role: "user", content: said }]); setText(""); }
    let collected: Answer[] = [];
    let walked: Step[] = [];
    try {
      for await (const reply of stream<Reply>("v1/generate", request, signal)) {
        const index = reply.index ?? 0;
        const old = collected[index] ?? { text: "", tokens: [] };
        collected = [...collected];
        collected[index] = { text: old.text + (reply.text ?? ""), tokens: [...old.tokens, ...(reply.tokens ?? [])], reason: reply.finish_reason ?? old.reason };
        setAnswers(collected);
        if (reply.search_steps) setSteps((walked = [...walked, ...reply.search_steps]));
        if (reply.search_trace) setTrace(reply.search_trace);
        if (reply.usage) setUsage(reply.usage);
      }
    } finally {
      if (chat && collected[0]) setMessages((old) => [...old, { role: "assistant", content: collected[0]!.text }]);
      else if (chat) { setMessages((old) => old.slice(0, -1)); setText(said); } // refused or stopped: as if it had not been sent
    }
  });
  const defaults = model.defaults ?? {};
  return (
    <div class="stack" onKeyDown={sends(go)}>
      <Card title={chat ? "Chat" : "Prompt"} tools={chat && messages.length > 0 && <button type="button" class="quiet" onClick={() => { setMessages([]); setAnswers([]); }}>New chat</button>}>
        {chat && <Field label="System"><input value={system} placeholder="none" onInput={(event) => setSystem(event.currentTarget.value)} /></Field>}
        {chat && messages.length > 0 && <div class="messages" role="log">{messages.map((each, index) => <p key={index} class={`message ${each.role}`}><b>{each.role}</b>{each.content}</p>)}
          {running && <p class="message assistant"><b>assistant</b>{answers[0]?.text}<span class="caret" /></p>}</div>}
        <textarea id="text" aria-label={chat ? "your message" : "prompt"} placeholder={chat ? "Your message" : undefined} rows={chat ? 2 : 4} value={text} onInput={(event) => setText(event.currentTarget.value)} autofocus />
        <div class="row">
          <NumberField label="Temperature" value={options.temperature ?? ""} onChange={set("temperature")} fallback={defaults.temperature} min={0} max={100} step="any" />
          <NumberField label="Answers" value={options.n ?? ""} onChange={set("n")} fallback={1} min={1} max={model.limits?.max_beam_size} />
          <NumberField label="Max tokens" value={options.max_tokens ?? ""} onChange={set("max_tokens")} fallback={defaults.max_new_tokens} min={1} />
          <RunButtons running={running} go={go} stop={stop} name={chat ? "Send" : "Generate"} disabled={chat && !text.trim()} />
        </div>
        <details class="more">
          <summary>More options <small>what is left empty is the model’s default</small></summary>
          <div class="row">
            <NumberField label="Beams" value={options.beam_size ?? ""} onChange={set("beam_size")} fallback={defaults.beam_size} min={1} max={model.limits?.max_beam_size} />
            <NumberField label="Top k" value={options.top_k ?? ""} onChange={set("top_k")} fallback={defaults.top_k} min={0} />
            <NumberField label="Top p" value={options.top_p ?? ""} onChange={set("top_p")} fallback={defaults.top_p} min={0} max={1} step="any" />
            <NumberField label="Min p" value={options.min_p ?? ""} onChange={set("min_p")} fallback={defaults.min_p} min={0} max={1} step="any" />
            <NumberField label="Seed" value={options.seed ?? ""} onChange={set("seed")} fallback="random" min={0} />
            <NumberField label="Repetition penalty" value={options.repetition_penalty ?? ""} onChange={set("repetition_penalty")} fallback={defaults.repetition_penalty} min={0.01} step="any" />
            <NumberField label="Presence penalty" value={options.presence_penalty ?? ""} onChange={set("presence_penalty")} fallback={0} step="any" />
            <NumberField label="Frequency penalty" value={options.frequency_penalty ?? ""} onChange={set("frequency_penalty")} fallback={0} step="any" />
            <Field label="Stop at" hint="several with |"><input value={options.stop ?? ""} onInput={(event) => set("stop")(event.currentTarget.value)} /></Field>
          </div>
        </details>
        <Problem error={error} />
      </Card>
      {(answers.length > 0 || running) && (
        <Card id="answer" title={answers.length > 1 ? "Answers" : "Answer"} tools={<><Confidence /><Copy text={answers.map((each) => each?.text ?? "").join("\n\n")} /></>}
          hint={usage ? `${usage.prompt_tokens ?? 0} tokens read${usage.cached_tokens ? ` (${usage.cached_tokens} known)` : ""} · ${usage.generated_tokens ?? 0} written` : "…"}>
          <div class={answers.length > 1 ? "side-by-side" : ""} aria-live="polite" aria-busy={running}>
            {answers.map((each, index) => each && (
              <div key={index} class="sample">
                <TokenText tokens={each.tokens} />
                {each.reason && <p class="hint">{REASONS[each.reason]}</p>}
              </div>
            ))}
          </div>
        </Card>
      )}
      {steps.length > 0 && <BeamTree steps={steps} trace={trace} running={running} />}
      <AsCode asked={{ path: "v1/generate", body }} />
    </div>
  );
}

/** Tokens in a row, each coloured by its probability, with the alternatives of the one that is pointed at. */
export function TokenText({ tokens, surprise = false }: { tokens: Token[]; surprise?: boolean }) {
  const [at, setAt] = useState<number | null>(null);
  const { row, tabIndex } = useRoving(tokens.length);
  const token = at === null ? undefined : tokens[at];
  return (
    <div class="token-text">
      <p class="tokens" onMouseLeave={() => setAt(null)} {...row}>
        {tokens.map((each, index) => {
          const known = each.log_prob !== undefined;
          const probability = Math.exp(each.log_prob ?? 0);
          const piece = each.piece ?? "";
          const mark = isEnd(piece) || isLanguage(piece);
          return <span key={index} tabIndex={tabIndex(index)} class={`${known ? confidence(probability) : ""}${mark ? " mark" : ""}`} onMouseEnter={() => setAt(index)} onFocus={() => setAt(index)} onBlur={() => setAt(null)}
            title={known ? (surprise ? `${(-each.log_prob! / Math.LN2).toFixed(1)} bits` : percent(probability)) : "nothing stands before it"}>{mark ? label(piece) : index === 0 ? readable(piece).trimStart() : readable(piece)}</span>;
        })}
      </p>
      <div class="alternatives" aria-live="polite">{token && <>
        <b>{label(token.piece, true)}</b>{token.log_prob !== undefined && ` ${percent(Math.exp(token.log_prob))}, ${(-token.log_prob / Math.LN2).toFixed(1)} bits`}
        {token.top?.length ? <ul>{token.top.map((each, index) => <li key={index} class={each.id === token.id ? "taken" : ""}><span>{label(each.piece, true)}</span><span class="bar"><i style={{ width: `${100 * Math.exp(each.log_prob ?? 0)}%` }} /></span><span class="figure">{percent(Math.exp(each.log_prob ?? 0))}</span></li>)}</ul> : null}
      </>}</div>
    </div>
  );
}
