// Text, model and options in; a translation that streams, with its n-best list, confidence, attention and search.
import { useEffect, useMemo, useState } from "preact/hooks";
import { stream, type Hypothesis, type Model, type Step, type Translation } from "./api.ts";
import { Attention } from "./attention.tsx";
import { AsCode, type Asked } from "./code.tsx";
import { Languages, tagOf } from "./languages.tsx";
import { words } from "./pieces.ts";
import { BeamTree } from "./tree-view.tsx";
import { Card, Confidence, confidence, Copy, Field, fixed, given, number, NumberField, percent, Problem, RunButtons, sends, useRoving, useRun } from "./ui.tsx";

const SAMPLES = [
  "The file could not be opened.", "Please wait until the download has finished.", "Do you want to save your changes before closing?",
  "Where is the train station?", "I would like a cup of coffee, please.", "The children are playing in the garden.",
];
const LONG = 320; // characters from which a text is split into sentences, unless told otherwise

interface Reply { input?: number; text?: string; translation?: Translation; search_steps?: Step[] }

export function Translate({ model }: { model: Model }) {
  const captions = !!model.feature_width;
  const [text, setText] = useState(captions ? "" : SAMPLES[0]!);
  const [options, setOptions] = useState<Record<string, string>>({});
  const [streamed, setStreamed] = useState("");
  const [steps, setSteps] = useState<Step[]>([]);
  const [answer, setAnswer] = useState<Translation | null>(null);
  const [seconds, setSeconds] = useState<number | null>(null);
  const [shown, setShown] = useState(0); // which hypothesis
  const [part, setPart] = useState(0);
  const { running, error, run, stop } = useRun();
  const set = (name: string) => (value: string) => setOptions((old) => ({ ...old, [name]: value }));
  useEffect(() => { setAnswer(null); setSteps([]); setStreamed(""); }, [model.name, model.version]);

  const splits = options.split === "on" || (options.split !== "off" && !captions && (text.length > LONG || text.trim().includes("\n")));
  const body = useMemo(() => request(model, text, options, splits), [model, text, options, splits]);
  const go = () => run(async (signal) => {
    const began = performance.now();
    setStreamed(""); setSteps([]); setAnswer(null); setShown(0); setPart(0); setSeconds(null);
    let collected: Step[] = [];
    for await (const reply of stream<Reply>("v1/translate", body, signal)) {
      if (reply.text) setStreamed((old) => old + reply.text);
      if (reply.search_steps) setSteps((collected = [...collected, ...reply.search_steps]));
      if (reply.translation) setAnswer(reply.translation);
    }
    setSeconds((performance.now() - began) / 1000);
  });

  const hypotheses = answer?.hypotheses ?? [];
  const hypothesis = hypotheses[Math.min(shown, hypotheses.length - 1)];
  const traces = answer?.search_traces ?? [];
  const own = useMemo(() => steps.filter((step) => (step.part ?? 0) === part), [steps, part]);
  const [hovered, setHovered] = useState<number[]>([]);
  const asked: Asked = { path: "v1/translate", body };
  const defaults = model.defaults ?? {};

  return (
    <div class="columns" onKeyDown={sends(go)}>
      <div class="stack">
        <Card title={captions ? "Features" : "Text"} tools={!captions && <Samples choose={setText} />}>
          {captions ? <FeatureInput model={model} text={text} setText={setText} />
            : <textarea id="text" aria-label="text to translate" value={text} onInput={(event) => setText(event.currentTarget.value)} rows={4} autofocus spellcheck />}
          <div class="row">
            <Languages model={model} source={options.source_language} target={options.target_language} onSource={set("source_language")} onTarget={set("target_language")} />
            <NumberField label="Beams" value={options.beam_size ?? ""} onChange={set("beam_size")} fallback={defaults.beam_size} min={1} max={model.limits?.max_beam_size} />
            <NumberField label="Length penalty" value={options.length_penalty ?? ""} onChange={set("length_penalty")} fallback={defaults.length_penalty} min={-10} max={10} step="any" />
            <RunButtons running={running} go={go} stop={stop} name={captions ? "Describe" : "Translate"} disabled={!text.trim()} />
          </div>
          <details class="more">
            <summary>More options <small>what is left empty is the model’s default</small></summary>
            <div class="row">
              <NumberField label="Hypotheses" value={options.num_hypotheses ?? ""} onChange={set("num_hypotheses")} fallback="all beams" min={1} max={model.limits?.max_beam_size} />
              <NumberField label="Max length" value={options.max_length ?? ""} onChange={set("max_length")} fallback={defaults.max_length} min={2} max={model.limits?.max_target_length} />
              <NumberField label="Min length" value={options.min_length ?? ""} onChange={set("min_length")} fallback={defaults.min_length} min={0} />
              <NumberField label="No repeated n-gram of" value={options.no_repeat_ngram_size ?? ""} onChange={set("no_repeat_ngram_size")} fallback={defaults.no_repeat_ngram_size} min={0} />
              <NumberField label="Repetition penalty" value={options.repetition_penalty ?? ""} onChange={set("repetition_penalty")} fallback={defaults.repetition_penalty} min={0.01} step="any" />
              <Field label="Early stopping"><select value={options.early_stopping ?? ""} onChange={(event) => set("early_stopping")(event.currentTarget.value)}>
                <option value="">default ({String(defaults.early_stopping)})</option><option value="EARLY_STOPPING_FALSE">false</option><option value="EARLY_STOPPING_TRUE">true</option><option value="EARLY_STOPPING_NEVER">never</option>
              </select></Field>
              {!captions && <Field label="Target prefix"><input value={options.target_prefix ?? ""} onInput={(event) => set("target_prefix")(event.currentTarget.value)} /></Field>}
              {!captions && <Field label="Split into sentences"><select value={options.split ?? ""} onChange={(event) => set("split")(event.currentTarget.value)}>
                <option value="">long texts ({splits ? "yes" : "no"})</option><option value="on">always</option><option value="off">never</option>
              </select></Field>}
            </div>
          </details>
          <Problem error={error} />
        </Card>
        <Card id="answer" title={captions ? "Caption" : "Translation"}
          hint={answer ? summary(answer, seconds, captions ? "vectors" : "tokens") : running ? "…" : splits ? "A long text: sentence by sentence, and only the best of each." : undefined}
          tools={<>{hypothesis?.tokens && <Confidence />}<Copy text={hypothesis?.text ?? streamed} /></>}>
          <div class="output" aria-live="polite" aria-busy={running} lang={tagOf(model, options.target_language || (model.default_target_language ?? only(model.target_languages)))}>
            {hypothesis?.tokens?.length && hypothesis.token_log_probs && !splits
              ? <Words hypothesis={hypothesis} onPoint={setHovered} />
              : <p class="plain">{hypothesis?.text ?? streamed}{running && <span class="caret" />}</p>}
          </div>
          {answer?.source && hypothesis?.alignment && <SourceStrip answer={answer} hypothesis={hypothesis} hovered={hovered} />}
          {hypotheses.length > 1 && (
            <ol class="nbest" aria-label="the best hypotheses">
              {hypotheses.map((each, index) => (
                <li key={index}><button type="button" aria-pressed={index === shown} onClick={() => setShown(index)}>
                  <span>{each.text}</span><span class="figure">{fixed(each.score)}</span><span class="bar"><i style={{ width: `${100 * share(hypotheses, index)}%` }} /></span>
                </button></li>
              ))}
            </ol>
          )}
        </Card>
      </div>
      <div class="stack">
        {answer && hypothesis?.alignment?.length ? <Attention key={shown} source={answer.source ?? regions(hypothesis)} what={captions ? "vector" : "source token"} hypothesis={hypothesis} hovered={hovered} />
          : <Card title="Attention"><p class="hint empty">What each word looked at: after a translation of one sentence.</p></Card>}
      </div>
      <div class="wide stack">
        {traces.length > 1 && <Field label="Sentence"><select value={part} onChange={(event) => setPart(Number(event.currentTarget.value))}>{traces.map((_, index) => <option key={index} value={index}>{index + 1} of {traces.length}</option>)}</select></Field>}
        {own.length > 0 ? <BeamTree steps={own} trace={traces[part]} running={running} />
          : <Card title="Beam tree"><p class="hint empty">Every step of the search, while it decodes.</p></Card>}
        <AsCode asked={asked} />
      </div>
    </div>
  );
}

function request(model: Model, text: string, options: Record<string, string>, splits: boolean) {
  const beams = number(options.beam_size ?? "") ?? model.defaults?.beam_size ?? 1;
  const wanted = given({
    beam_size: number(options.beam_size ?? ""), num_hypotheses: splits ? 1 : number(options.num_hypotheses ?? "") ?? beams,
    length_penalty: number(options.length_penalty ?? ""), early_stopping: options.early_stopping, min_length: number(options.min_length ?? ""),
    max_length: number(options.max_length ?? ""), no_repeat_ngram_size: number(options.no_repeat_ngram_size ?? ""),
    repetition_penalty: number(options.repetition_penalty ?? ""), target_prefix: options.target_prefix, split_sentences: splits || undefined,
    return_scores: true, return_tokens: true, return_alignment: splits ? undefined : true, return_search_trace: splits && text.length > 1500 ? undefined : true,
  });
  return given({
    model: model.name, version: model.version, source_language: options.source_language, target_language: options.target_language,
    inputs: [model.feature_width ? { features: features(text, model.feature_width) } : { text }], options: wanted,
  });
}

function features(text: string, columns: number) {
  const values = text.split(/[\s,;[\]]+/).filter((each) => each !== "").map(Number);
  return { rows: Math.max(1, Math.floor(values.length / columns)), columns, values };
}

/** In place of an image: the vectors that its encoder made. */
function FeatureInput({ model, text, setText }: { model: Model; text: string; setText: (text: string) => void }) {
  const width = model.feature_width!;
  const random = () => setText(Array.from({ length: 4 }, () => Array.from({ length: width }, () => (2 * Math.random() - 1).toFixed(3)).join(" ")).join("\n"));
  return (
    <>
      <p class="hint">This model reads vectors of {width} values, one line for each, such as an image encoder makes.</p>
      <div class="fill">
        <button type="button" class="quiet" id="random" onClick={random}>Random ones</button>
        <label class="quiet file">From a file<input type="file" accept=".txt,.csv,.json" onChange={async (event) => { const file = event.currentTarget.files?.[0]; if (file) setText(await file.text()); }} /></label>
      </div>
      <textarea id="text" aria-label="feature vectors" class="mono" rows={5} value={text} onInput={(event) => setText(event.currentTarget.value)} />
    </>
  );
}

const only = (codes: string[] | undefined) => (codes?.length === 1 ? codes[0] : undefined);

/** The columns of a model that reads no text: the vectors by their numbers. */
const regions = (hypothesis: Hypothesis) => hypothesis.alignment![0]!.weights.map((_, index) => ({ piece: `▁${index + 1}` }));

function Samples({ choose }: { choose: (text: string) => void }) {
  return (
    <select aria-label="sample texts" value="" onChange={(event) => { if (event.currentTarget.value) choose(event.currentTarget.value); event.currentTarget.value = ""; }}>
      <option value="">Sample texts…</option>{SAMPLES.map((each) => <option key={each}>{each}</option>)}
    </select>
  );
}

function Words({ hypothesis, onPoint }: { hypothesis: Hypothesis; onPoint: (tokens: number[]) => void }) {
  const tokens = hypothesis.tokens!;
  const found = words(tokens);
  const { row, tabIndex } = useRoving(found.length);
  const point = (index: number | null) => {
    const word = index === null ? undefined : found[index];
    onPoint(word ? Array.from({ length: word.last - word.first + 1 }, (_, place) => word.first + place) : []);
  };
  return (
    <p class="words" onMouseLeave={() => point(null)} {...row}>
      {found.map((word, index) => {
        const logProb = (hypothesis.token_log_probs ?? []).slice(word.first, word.last + 1).reduce((sum, each) => sum + each, 0);
        const probability = Math.exp(logProb);
        return <span key={index} class={confidence(probability)} tabIndex={tabIndex(index)} title={percent(probability)} data-probability={probability}
          aria-label={`${word.text}, ${percent(probability)}`} onMouseEnter={() => point(index)} onFocus={() => point(index)} onBlur={() => point(null)}>{word.text}</span>;
      })}
    </p>
  );
}

/** The source, each word as strong as the pointed one looked at it. */
function SourceStrip({ answer, hypothesis, hovered }: { answer: Translation; hypothesis: Hypothesis; hovered: number[] }) {
  const rows = hovered.map((row) => hypothesis.alignment?.[row]?.weights ?? []);
  const weight = (column: number) => (rows.length ? rows.reduce((sum, row) => sum + (row[column] ?? 0), 0) / rows.length : 0);
  const strip = words(answer.source!).map((word) => {
    let total = 0;
    for (let column = word.first; column <= word.last; column += 1) total += weight(column);
    return { ...word, total };
  });
  return <p class="source-strip" aria-hidden="true">{strip.map((word, index) => <span key={index} style={{ "--attention": Math.min(1, word.total).toFixed(3) }}>{word.text}</span>)}</p>;
}

function share(hypotheses: Hypothesis[], index: number): number {
  const best = hypotheses[0]?.score ?? 0;
  return Math.exp(((hypotheses[index]?.score ?? 0) - best) * 3);
}

function summary(answer: Translation, seconds: number | null, read: string): string {
  const timings = answer.timings ?? {};
  const parts = [`${answer.source_tokens ?? 0} ${read} read`, `${answer.hypotheses[0]?.token_log_probs?.length ?? 0} tokens written`];
  if (timings.decode_ms !== undefined) parts.push(`decoded in ${timings.decode_ms.toFixed(0)} ms`);
  if (timings.queue_ms !== undefined && timings.queue_ms >= 1) parts.push(`waited ${timings.queue_ms.toFixed(0)} ms`);
  if (seconds !== null) parts.push(`${(1000 * seconds).toFixed(0)} ms in all`);
  return parts.join(" · ");
}
