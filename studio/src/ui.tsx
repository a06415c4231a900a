// Small things that several views use.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api.ts";

export function Card({ title, hint, tools, children, id }: {
  title: string; hint?: ComponentChildren; tools?: ComponentChildren; children: ComponentChildren; id?: string;
}) {
  return (
    <section class="card" id={id} aria-label={title}>
      <header class="card-head">
        <div><h2>{title}</h2>{hint && <p class="hint">{hint}</p>}</div>
        {tools && <div class="tools">{tools}</div>}
      </header>
      {children}
    </section>
  );
}

export function Problem({ error }: { error: unknown }) {
  if (!error) return null;
  if (error instanceof DOMException && error.name === "AbortError") return null;
  const token = error instanceof ApiError && error.wantsToken;
  return <p class="alert bad" role="alert">{String((error as Error).message ?? error)}{token && " The button “Token” above takes one."}</p>;
}

export function Field({ label, hint, children }: { label: string; hint?: string; children: ComponentChildren }) {
  return <label class="field"><span>{label}{hint && <small> {hint}</small>}</span>{children}</label>;
}

/** A number that may be left out: then the model's default is meant, which it shows. */
export function NumberField({ label, value, onChange, fallback, ...limits }: {
  label: string; value: string; onChange: (value: string) => void; fallback?: unknown; min?: number; max?: number; step?: number | "any";
}) {
  return (
    <Field label={label}>
      <input type="number" value={value} placeholder={fallback === undefined || fallback === null ? "" : String(fallback)}
        onInput={(event) => onChange(event.currentTarget.value)} {...limits} />
    </Field>
  );
}

export function Copy({ text, label = "Copy" }: { text: string; label?: string }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); }
    catch { // without a secure context there is no clipboard, but there is a selection
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1200);
  };
  return <button type="button" class="quiet" onClick={copy} disabled={!text}>{done ? "Copied" : label}</button>;
}

/** Work that can be stopped: at most one runs. */
export function useRun() {
  const [running, setRunning] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const run = async (work: (signal: AbortSignal) => Promise<void>) => {
    abort.current?.abort();
    const mine = (abort.current = new AbortController());
    setRunning(true);
    setError(null);
    try { await work(mine.signal); }
    catch (problem) { if (!mine.signal.aborted) setError(problem); }
    finally { if (abort.current === mine) setRunning(false); }
  };
  const stop = () => { abort.current?.abort(); setRunning(false); };
  return { running, error, run, stop, setError };
}

/** Ctrl+Enter in a form. */
export function sends(go: () => void) {
  return (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); }
  };
}

export function RunButtons({ running, go, stop, name, disabled }: {
  running: boolean; go: () => void; stop: () => void; name: string; disabled?: boolean;
}) {
  return running
    ? <button type="button" class="primary stop" onClick={stop}>Stop</button>
    : <button type="button" class="primary" onClick={go} disabled={disabled}>{name} <kbd>Ctrl ↵</kbd></button>;
}

/** Of many small things in a row only one is a stop of the Tab key; the arrow keys go on from it. */
export function useRoving(count: number) {
  const [at, setAt] = useState(0);
  const here = Math.min(at, Math.max(0, count - 1));
  const onKeyDown = (event: KeyboardEvent) => {
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: count - 1 }[event.key];
    if (next === undefined || next < 0 || next >= count) return;
    event.preventDefault();
    setAt(next);
    ((event.currentTarget as HTMLElement).children[next] as HTMLElement).focus();
  };
  const onFocusCapture = (event: FocusEvent) => {
    const found = [...(event.currentTarget as HTMLElement).children].indexOf(event.target as HTMLElement);
    if (found >= 0) setAt(found);
  };
  return { row: { onKeyDown, onFocusCapture }, tabIndex: (index: number) => (index === here ? 0 : -1) };
}

export const percent = (value: number) => `${(100 * value).toFixed(value > 0.9995 || value < 0.0995 ? 1 : 0)} %`;
export const fixed = (value: number | undefined, digits = 3) => (value === undefined ? "–" : value.toFixed(digits));

/** How sure the model was, from 0 to 5, as the class of a colour. */
export function confidence(probability: number): string {
  const level = probability > 0.9 ? 5 : probability > 0.7 ? 4 : probability > 0.5 ? 3 : probability > 0.3 ? 2 : probability > 0.1 ? 1 : 0;
  return `sure sure-${level}`;
}

export function Confidence() {
  return (
    <span class="legend-sure" aria-hidden="true">
      unsure {[0, 1, 2, 3, 4, 5].map((level) => <i key={level} class={`sure-${level}`} />)} sure
    </span>
  );
}

export function number(text: string): number | undefined {
  const value = Number(text);
  return text.trim() === "" || Number.isNaN(value) ? undefined : value;
}

/** Without what was left out. */
export function given<T extends Record<string, unknown>>(options: T): Partial<T> {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined && value !== "")) as Partial<T>;
}

export function save(name: string, blob: Blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A drawing as a file of its own. What the page's style sheet says is written into its elements. */
export function svgText(svg: SVGSVGElement): string {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const originals = [svg, ...svg.querySelectorAll("*")];
  const styled = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "stroke-opacity",
    "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];
  [copy, ...copy.querySelectorAll("*")].forEach((element, index) => {
    const style = getComputedStyle(originals[index]!);
    const inherited = index === 0 ? null : getComputedStyle(originals[index]!.parentElement!);
    for (const name of styled) {
      const value = style.getPropertyValue(name);
      const usual = name === "opacity" ? "1" : inherited?.getPropertyValue(name); // opacity alone is not inherited
      if (value && value !== usual) element.setAttribute(name, value);
    }
    for (const name of element.getAttributeNames()) if (/^(class|tabindex|role|aria-.*|data-.*)$/.test(name)) element.removeAttribute(name);
  });
  const box = svg.viewBox.baseVal;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(box.width));
  copy.setAttribute("height", String(box.height));
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  back.setAttribute("width", "100%");
  back.setAttribute("height", "100%");
  back.setAttribute("fill", getComputedStyle(document.documentElement).getPropertyValue("--card").trim());
  copy.prepend(back);
  return new XMLSerializer().serializeToString(copy);
}

export function saveSvg(svg: SVGSVGElement, name: string) {
  save(`${name}.svg`, new Blob([svgText(svg)], { type: "image/svg+xml" }));
}

export function savePng(svg: SVGSVGElement, name: string) {
  const box = svg.viewBox.baseVal;
  const image = new Image();
  const address = URL.createObjectURL(new Blob([svgText(svg)], { type: "image/svg+xml" }));
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = 2 * box.width;
    canvas.height = 2 * box.height;
    canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(address);
    canvas.toBlob((blob) => blob && save(`${name}.png`, blob));
  };
  image.src = address;
}

export function Downloads({ svg, name }: { svg: () => SVGSVGElement | null; name: string }) {
  return (
    <>
      <button type="button" class="quiet" onClick={() => { const found = svg(); if (found) saveSvg(found, name); }}>SVG</button>
      <button type="button" class="quiet" onClick={() => { const found = svg(); if (found) savePng(found, name); }}>PNG</button>
    </>
  );
}
