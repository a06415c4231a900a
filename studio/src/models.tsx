// What is served, and why not; loading and unloading; certificates.
import { useEffect, useState } from "preact/hooks";
import { get, hasToken, onToken, post, type Listed, type Model } from "./api.ts";
import { Card, Problem } from "./ui.tsx";

const STATES: Record<string, string> = { READY: "ready", LOADING: "loading", UNLOADING: "unloading", UNAVAILABLE: "not served" };

export function Models({ models, refresh }: { models: Model[]; refresh: () => void }) {
  const [listed, setListed] = useState<Listed[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState("");
  const [shown, setShown] = useState<{ name: string; version: string } | null>(null);
  const load = () => get<{ models: Listed[] }>("v1/repository").then((found) => { setListed(found.models); setError(null); }, setError);
  useEffect(() => {
    load();
    const timer = setInterval(load, 5000);
    const off = onToken(load);
    return () => { clearInterval(timer); off(); };
  }, []);
  const change = async (name: string, what: "load" | "unload") => {
    setBusy(name);
    try { setListed((await post<{ models: Listed[] }>(`v1/repository/${encodeURIComponent(name)}/${what}`, {})).models); setError(null); refresh(); }
    catch (problem) { setError(problem); load(); }
    finally { setBusy(""); }
  };
  const card = (each: Listed) => models.find((model) => model.name === each.name && model.version === each.version);
  return (
    <div class="stack">
      <Card id="models" title="Models" hint={`What the repository holds. Loading and unloading needs a token with the scope “admin” where the server wants tokens${hasToken() ? "" : " (none is set)"}.`}>
        <Problem error={error} />
        <div class="table"><table>
          <thead><tr><th scope="col">model</th><th scope="col">version</th><th scope="col">state</th><th scope="col">task</th><th scope="col">beams up to</th><th scope="col">source, target up to</th><th scope="col"><span class="hidden">actions</span></th></tr></thead>
          <tbody>{listed.map((each) => {
            const model = card(each);
            const served = each.state === "READY";
            return <tr key={`${each.name}/${each.version}`}>
              <td><b>{each.name}</b></td><td>{each.version || "–"}</td>
              <td><span class={`chip ${each.state.toLowerCase()}`}>{STATES[each.state] ?? each.state}</span>{each.reason && <small class="reason">{each.reason}</small>}</td>
              <td>{model?.task ?? "–"}</td><td>{model?.limits?.max_beam_size ?? "–"}</td>
              <td>{model?.limits ? `${model.limits.max_source_length}, ${model.limits.max_target_length} tokens` : "–"}</td>
              <td><div class="actions">
                {each.version && <button type="button" class="quiet" aria-expanded={shown?.name === each.name && shown.version === each.version} onClick={() => setShown(shown?.name === each.name && shown.version === each.version ? null : each)}>Certificate</button>}
                <button type="button" class="quiet" disabled={busy !== ""} onClick={() => change(each.name, served ? "unload" : "load")}>{busy === each.name ? "…" : served ? "Unload" : "Load"}</button>
                {served && <button type="button" class="quiet" disabled={busy !== ""} onClick={() => change(each.name, "load")}>Reload</button>}
              </div></td>
            </tr>;
          })}</tbody>
        </table></div>
      </Card>
      {shown && <Certificate key={`${shown.name}/${shown.version}`} {...shown} />}
    </div>
  );
}

function Certificate({ name, version }: { name: string; version: string }) {
  const [found, setFound] = useState<Record<string, any> | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => { get<Record<string, any>>(`v1/repository/${encodeURIComponent(name)}/${version}/certificate`).then(setFound, setError); }, []);
  const share = (value: number) => `${(100 * value).toFixed(2)} %`;
  const power = (value: number) => (Math.abs(value) < 0.001 ? value.toExponential(2) : value.toPrecision(3));
  const rows = found ? checks(found, share, power) : [];
  return (
    <Card id="certificate" title={`Certificate of ${name}, version ${version}`} hint="What comparing the exported graphs with the original PyTorch model found when it was converted.">
      <Problem error={error} />
      {found && <>
        <ul class="checks">{rows.map((row) => (
          <li key={row.what} class={row.passed === undefined ? "" : row.passed ? "passed" : "failed"}>
            <span class="mark" aria-hidden="true">{row.passed === undefined ? "·" : row.passed ? "✓" : "✗"}</span>
            <span>{row.what}<small>{row.about}</small></span><b>{row.found}</b><span class="allowed">{row.allowed}</span>
          </li>
        ))}</ul>
        {found.created_with && <p class="hint">Made with {Object.entries(found.created_with).map(([key, value]) => `${key} ${value}`).join(", ")}.</p>}
        <details class="more"><summary>All of it, as parity.json has it</summary><pre class="code" tabIndex={0}>{JSON.stringify(found, null, 2)}</pre></details>
      </>}
    </Card>
  );
}

interface Check { what: string; about: string; found: string; allowed: string; passed?: boolean }

export function checks(found: Record<string, any>, share: (value: number) => string, power: (value: number) => string): Check[] {
  const rows: Check[] = [];
  const tolerance = found.tolerance ?? {};
  if (found.max_log_prob_difference !== undefined) rows.push({
    what: "Largest difference of a log-probability", about: `over a grid of beams, lengths and batches${found.longest_compared ? `, up to ${found.longest_compared} tokens` : ""}`, found: power(found.max_log_prob_difference),
    allowed: tolerance.log_prob === undefined ? "" : `at most ${tolerance.log_prob}`, passed: tolerance.log_prob === undefined ? undefined : found.max_log_prob_difference <= tolerance.log_prob,
  });
  if (found.beam_exact_share !== undefined) rows.push({
    what: "Identical beams", about: `of ${found.beams_compared}, ${found.ties ?? 0} ties`, found: share(found.beam_exact_share),
    allowed: tolerance.beam_exact === undefined ? "" : `at least ${share(tolerance.beam_exact)}`, passed: found.beam_exact_share >= (tolerance.beam_exact ?? 0),
  });
  if (found.text_exact_share !== undefined && found.text_exact_share !== null) rows.push({
    what: "Identical ids and text", about: `of ${found.lines_compared} lines, through the tokenizers`, found: share(found.text_exact_share),
    allowed: tolerance.text_exact === undefined ? "" : `at least ${share(tolerance.text_exact)}`, passed: found.text_exact_share >= (tolerance.text_exact ?? 0),
  });
  if (found.max_difference !== undefined) rows.push({
    what: "Largest difference of a value", about: `of probabilities and vectors, over ${found.requests_compared} requests`, found: power(found.max_difference),
    allowed: tolerance.value === undefined ? "" : `at most ${tolerance.value}`, passed: tolerance.value === undefined ? undefined : found.max_difference <= tolerance.value,
  });
  if (found.label_exact_share !== undefined) rows.push({
    what: "The same label", about: "as the original model gives", found: share(found.label_exact_share),
    allowed: tolerance.label_exact === undefined ? "" : `at least ${share(tolerance.label_exact)}`, passed: found.label_exact_share >= (tolerance.label_exact ?? 0),
  });
  const lowered = found.lowered;
  if (lowered) rows.push({
    what: `${lowered.precision} beside float32: mean difference`, about: `over ${lowered.requests_compared} requests; largest ${power(lowered.max_log_prob_difference)}`,
    found: power(lowered.mean_log_prob_difference), allowed: lowered.mean_log_prob_allowed == null ? "" : `at most ${lowered.mean_log_prob_allowed}`,
    passed: lowered.mean_log_prob_allowed == null ? undefined : lowered.mean_log_prob_difference <= lowered.mean_log_prob_allowed,
  }, {
    what: `${lowered.precision} beside float32: the same best answer`, about: "what rounding changes, said openly", found: share(lowered.same_best_share),
    allowed: lowered.same_best_required ? `at least ${share(lowered.same_best_required)}` : "", passed: lowered.same_best_required ? lowered.same_best_share >= lowered.same_best_required : undefined,
  });
  return rows;
}
