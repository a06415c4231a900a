// The languages of a model that knows several: its own codes in requests, their names for people.
import type { Model } from "./api.ts";
import { Field } from "./ui.tsx";

const names = new Intl.DisplayNames(["en"], { type: "language", fallback: "none" });

/** The standard tag of a model's code, which is often one itself. */
export const tagOf = (model: Model, code: string | undefined) => code && (model.language_tags?.[code] ?? code.replaceAll("_", "-"));

/** In English; a language that this browser has no name for keeps its code. */
export function nameOf(model: Model, code: string): string {
  const tag = tagOf(model, code)!;
  try { return (names.of(tag.split("-")[0]!) && names.of(tag)) ?? code; }
  catch { return code; } // no tag: a code of the checkpoint's own
}

/** By name, where two have the same one with their codes; those that have none come last. */
export function named(model: Model, codes: string[]): { code: string; name: string }[] {
  const found = codes.map((code) => ({ code, name: nameOf(model, code) }));
  const count = new Map<string, number>();
  for (const each of found) count.set(each.name, (count.get(each.name) ?? 0) + 1);
  return found.map(({ code, name }) => ({ code, name: count.get(name)! > 1 ? `${name}, ${code}` : name }))
    .sort((a, b) => Number(a.name === a.code) - Number(b.name === b.code) || a.name.localeCompare(b.name, "en"));
}

/** The two choices, each where there is one. */
export function Languages({ model, source, target, onSource, onTarget }: {
  model: Model; source?: string; target?: string; onSource: (code: string) => void; onTarget: (code: string) => void;
}) {
  return (
    <>
      <Choice id="source-language" label="From" model={model} codes={model.source_languages} usual={model.default_source_language} value={source} onChange={onSource} />
      <Choice id="target-language" label="To" model={model} codes={model.target_languages} usual={model.default_target_language} value={target} onChange={onTarget} />
    </>
  );
}

function Choice({ id, label, model, codes = [], usual, value, onChange }: {
  id: string; label: string; model: Model; codes?: string[]; usual?: string | null; value?: string; onChange: (code: string) => void;
}) {
  if (codes.length < 2) return null;
  return <Field label={label}><select id={id} class="language" value={value ?? ""} onChange={(event) => onChange(event.currentTarget.value)}>
    <option value="">{usual ? `${nameOf(model, usual)} (default)` : "choose…"}</option>
    {named(model, codes).map((each) => <option key={each.code} value={each.code}>{each.name}</option>)}
  </select></Field>;
}
