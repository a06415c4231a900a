// Score, classify, embed: a text in, figures out.
import { useState } from "preact/hooks";
import { post, type Model, type Token } from "./api.ts";
import { AsCode } from "./code.tsx";
import { TokenText } from "./generate.tsx";
import { Languages } from "./languages.tsx";
import { Card, Confidence, Field, fixed, given, percent, Problem, RunButtons, sends, useRun } from "./ui.tsx";

interface Scored { tokens?: Token[]; log_prob?: number; perplexity?: number; scored_tokens?: number }

export function Score({ model }: { model: Model }) {
  const translates = model.task === "translate";
  const [source, setSource] = useState("Save the file.");
  const [text, setText] = useState(translates ? "Speichern Sie die Datei.\nDatei die Sie speichern." : "The cat sat on the mat.\nMat the on sat cat the.");
  const [source_language, setSourceLanguage] = useState<string | undefined>();
  const [target_language, setTargetLanguage] = useState<string | undefined>();
  const [found, setFound] = useState<Scored[]>([]);
  const { running, error, run, stop } = useRun();
  const texts = text.split("\n").filter((line) => line.trim());
  const body = given({ model: model.name, version: model.version, source_language, target_language, sources: translates ? [{ text: source }] : undefined, texts: texts.map((each) => ({ text: each })) });
  const go = () => run(async (signal) => setFound((await post<{ scores: Scored[] }>("v1/score", body, signal)).scores));
  return (
    <div class="stack" onKeyDown={sends(go)}>
      <Card title="Score" hint={`How likely the model finds given ${translates ? "translations" : "texts"}, one on each line.`}>
        {translates && <Field label="Source"><input id="source" value={source} onInput={(event) => setSource(event.currentTarget.value)} /></Field>}
        <Field label={translates ? "Translations" : "Texts"}><textarea id="text" rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} /></Field>
        <div class="row">
          {translates && <Languages model={model} source={source_language} target={target_language} onSource={setSourceLanguage} onTarget={setTargetLanguage} />}
          <RunButtons running={running} go={go} stop={stop} name="Score" disabled={!texts.length} />
        </div>
        <Problem error={error} />
      </Card>
      {found.length > 0 && <Card id="answer" title="Surprise" tools={<Confidence />} hint="The redder, the less the model expected it. Perplexity: among how many tokens it hesitated, on average.">
        {found.map((each, index) => (
          <div key={index} class="scored">
            <TokenText tokens={each.tokens ?? []} surprise />
            <dl class="figures"><div><dt>perplexity</dt><dd>{fixed(each.perplexity, 2)}</dd></div><div><dt>log-probability</dt><dd>{fixed(each.log_prob, 2)}</dd></div><div><dt>tokens</dt><dd>{each.scored_tokens ?? 0}</dd></div></dl>
          </div>
        ))}
      </Card>}
      <AsCode asked={{ path: "v1/score", body }} />
    </div>
  );
}

interface Labelled { labels: { name: string; probability?: number }[] }

export function Classify({ model }: { model: Model }) {
  const [text, setText] = useState("What a beautiful day.\nNothing works, and nobody answers.");
  const [found, setFound] = useState<{ texts: string[]; answers: Labelled[] } | null>(null);
  const { running, error, run, stop } = useRun();
  const texts = text.split("\n").filter((line) => line.trim());
  const body = { model: model.name, version: model.version, inputs: texts.map((each) => ({ text: each })) };
  const go = () => run(async (signal) => setFound({ texts, answers: (await post<{ classifications: Labelled[] }>("v1/classify", body, signal)).classifications }));
  return (
    <div class="stack" onKeyDown={sends(go)}>
      <Card title="Classify" hint="One text on each line.">
        <textarea id="text" aria-label="texts to classify" rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <div class="row"><RunButtons running={running} go={go} stop={stop} name="Classify" disabled={!texts.length} /></div>
        <Problem error={error} />
      </Card>
      {found && <Card id="answer" title="Labels">{found.answers.map((each, index) => (
        <div key={index} class="labelled"><p>{found.texts[index]}</p><ul class="bars">{each.labels.slice(0, 8).map((one) => (
          <li key={one.name}><span>{one.name}</span><span class="bar"><i style={{ width: `${100 * (one.probability ?? 0)}%` }} /></span><span class="figure">{percent(one.probability ?? 0)}</span></li>
        ))}</ul></div>
      ))}</Card>}
      <AsCode asked={{ path: "v1/classify", body }} />
    </div>
  );
}

export function cosine(a: number[], b: number[]): number {
  let both = 0, one = 0, other = 0;
  a.forEach((value, index) => { both += value * b[index]!; one += value * value; other += b[index]! * b[index]!; });
  return both / Math.sqrt(one * other || 1);
}

export function Embed({ model }: { model: Model }) {
  const [text, setText] = useState("Save the file.\nStore the document.\nA cup of coffee.");
  const [found, setFound] = useState<{ texts: string[]; vectors: number[][] } | null>(null);
  const { running, error, run, stop } = useRun();
  const texts = text.split("\n").filter((line) => line.trim());
  const body = { model: model.name, version: model.version, inputs: texts.map((each) => ({ text: each })), normalize: true };
  const go = () => run(async (signal) => {
    const answer = await post<{ embeddings: { values: number[] }[] }>("v1/embed", body, signal);
    setFound({ texts, vectors: answer.embeddings.map((each) => each.values) });
  });
  const alike = found ? found.vectors.map((row) => found.vectors.map((other) => cosine(row, other))) : [];
  const least = Math.min(0.999, ...alike.flat()); // colours begin here: texts are often all rather alike
  const short = (value: string) => (value.length > 28 ? `${value.slice(0, 27)}…` : value);
  return (
    <div class="stack" onKeyDown={sends(go)}>
      <Card title="Embed" hint="One text on each line; the matrix says how alike their vectors are.">
        <textarea id="text" aria-label="texts to embed" rows={5} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <div class="row"><RunButtons running={running} go={go} stop={stop} name="Embed" disabled={!texts.length} /></div>
        <Problem error={error} />
      </Card>
      {found && <Card id="answer" title="Similarity" hint={`Cosine of vectors with ${found.vectors[0]?.length ?? 0} values. The stronger the colour, the more alike among these.`}>
        <div class="table"><table class="matrix"><thead><tr><td />{found.texts.map((each, index) => <th key={index} scope="col">{short(each)}</th>)}</tr></thead>
          <tbody>{alike.map((row, index) => <tr key={index}><th scope="row">{short(found.texts[index]!)}</th>{row.map((value, column) =>
            <td key={column} style={{ "--attention": ((value - least) / (1 - least)).toFixed(3) }}>{value.toFixed(2)}</td>)}</tr>)}</tbody></table></div>
      </Card>}
      <AsCode asked={{ path: "v1/embed", body }} />
    </div>
  );
}
