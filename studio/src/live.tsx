// The last ten minutes of the server, and the batch that runs.
import { useEffect, useState } from "preact/hooks";
import { ApiError, get, onToken } from "./api.ts";
import { Chart, type Line } from "./chart.tsx";
import { Card, Problem } from "./ui.tsx";

interface Point {
  seconds_ago: number; requests: number; failed: number; tokens: number; steps: number; step_seconds: number; active: number; mean_active: number; queued: number;
  memory: number; p50: number | null; p95: number | null; p99: number | null;
}
interface Past { bin_seconds: number; bins: number; memory: number; models: { name: string; version: string; slots: number; points: Point[] }[] }
interface Batch {
  seconds: number;
  models: { name: string; version: string; slots: number; running: { slot: number; began: number; ended: number | null; beams: number; tokens: number }[];
    finished: { slot: number; began: number; ended: number; tokens: number; outcome: string }[] }[];
}

/** Asks again and again while the view is shown and the tab is in front. */
function usePolled<T>(path: string, seconds: number): { found: T | null; error: unknown } {
  const [state, setState] = useState<{ found: T | null; error: unknown }>({ found: null, error: null });
  useEffect(() => {
    let gone = false, timer = 0;
    const ask = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try { const found = await get<T>(path); if (!gone) setState({ found, error: null }); }
        catch (error) {
          if (!gone) setState((old) => ({ found: old.found, error }));
          if (error instanceof ApiError && error.wantsToken) return; // until there is another token
        }
      }
      if (!gone) timer = window.setTimeout(ask, 1000 * seconds);
    };
    ask();
    const off = onToken(ask);
    return () => { gone = true; clearTimeout(timer); off(); };
  }, [path]);
  return state;
}

/** A value for each bin; where nothing happened, what `idle` says. */
function series(points: Point[], past: Past, value: (point: Point) => number | null, idle: number | null) {
  const found: { ago: number; value: number | null }[] = [];
  const byBin = new Map(points.map((point) => [Math.round(point.seconds_ago / past.bin_seconds - 0.5), point]));
  for (let bin = past.bins - 1; bin >= 1; bin -= 1) {
    const point = byBin.get(bin);
    found.push({ ago: bin * past.bin_seconds, value: point ? value(point) : idle });
  }
  return found;
}

const COLORS = ["c1", "c2", "c5", "c3", "c4"];
/** Of the model with that place: the colours come again, dashed. */
const colorOf = (place: number) => `${COLORS[place % COLORS.length]!}${place >= COLORS.length ? " dashed" : ""}`;

export function Live() {
  const { found: past, error } = usePolled<Past>("v1/live", 2);
  const [only, setOnly] = useState("");
  if (!past) return <div class="stack"><Problem error={error} /></div>;
  const key = (model: { name: string; version: string }) => `${model.name}/${model.version}`;
  const models = past.models.filter((model) => !only || key(model) === only);
  // A model that did nothing is a line at zero, of which many hide the others.
  const drawn = past.models.map((model, place) => ({ ...model, color: colorOf(place) })).filter((model) => (only ? key(model) === only : model.points.length > 0));
  const idle = models.filter((model) => model.points.length === 0);
  const seconds = past.bins * past.bin_seconds;
  const each = (value: (point: Point) => number | null, idle: number | null): Line[] =>
    drawn.map((model) => ({ name: model.name, color: model.color, points: series(model.points, past, value, idle) }));
  const recent = models.flatMap((model) => model.points.filter((point) => point.seconds_ago < 12));
  const sum = (value: (point: Point) => number) => recent.reduce((total, point) => total + value(point), 0);
  const now = models.map((model) => model.points.find((point) => point.seconds_ago < 2 * past.bin_seconds));
  const active = now.reduce((total, point) => total + (point?.active ?? 0), 0);
  const slots = models.reduce((total, model) => total + model.slots, 0);
  const p95 = Math.max(0, ...recent.map((point) => point.p95 ?? 0));
  const memory = past.memory / 2 ** 20;
  return (
    <div class="stack" id="live">
      <Problem error={error} />
      {past.models.length > 1 && <label class="choice">Model <select value={only} onChange={(event) => setOnly(event.currentTarget.value)}><option value="">all</option>{past.models.map((model) => <option key={key(model)} value={key(model)}>{model.name}, version {model.version}</option>)}</select></label>}
      <div class="cards">
        <Figure name="requests" value={(sum((point) => point.requests) / 10).toFixed(1)} more="a second, over ten seconds" />
        <Figure name="tokens" value={(sum((point) => point.tokens) / 10).toFixed(0)} more="written a second" />
        <Figure name="slots" value={`${active} of ${slots}`} more="taken, at the most" />
        <Figure name="queue" value={String(now.reduce((total, point) => total + (point?.queued ?? 0), 0))} more="requests wait" />
        <Figure name="p95" value={p95 ? `${(1000 * p95).toFixed(0)} ms` : "–"} more="from submission to answer" />
        <Figure name="failed" value={String(sum((point) => point.failed))} more="in ten seconds" bad={sum((point) => point.failed) > 0} />
        <Figure name="memory" value={memory ? `${memory.toFixed(0)} MiB` : "–"} more="of the process" />
      </div>
      {idle.length > 0 && <p class="hint">Idle for ten minutes, and not drawn: {idle.map((model) => model.name).join(", ")}.</p>}
      <div class="plots">
        <Chart title="Requests a second" hint="answered or failed" seconds={seconds} lines={each((point) => point.requests / past.bin_seconds, 0)} />
        <Chart title="Tokens a second" hint="of the best hypotheses" seconds={seconds} lines={each((point) => point.tokens / past.bin_seconds, 0)} />
        <Chart title="Slots taken" hint="the most at once" seconds={seconds} whole lines={each((point) => point.active, 0)} />
        <Chart title="Occupancy" hint="share of the slots that a step used, on average" unit=" %" seconds={seconds} lines={drawn.map((model) => ({ name: model.name, color: model.color, points: series(model.points, past, (point) => (100 * point.mean_active) / model.slots, 0) }))} />
        <Chart title="Queue" hint="the most that waited" seconds={seconds} whole lines={each((point) => point.queued, 0)} />
        <Chart title="Step" hint="mean time of a step" unit=" ms" seconds={seconds} lines={each((point) => (point.steps ? (1000 * point.step_seconds) / point.steps : null), null)} />
        <Chart title="Latency" hint="from submission to answer; a percentile looks back ten seconds" unit=" ms" seconds={seconds} lines={latencies(drawn, past)} />
        <Chart title="Memory" hint="of the whole process" unit=" MiB" seconds={seconds} lines={[{ name: "resident", color: "c4", points: memoryOf(past) }]} />
      </div>
      <BatchView />
    </div>
  );
}

function latencies(models: (Past["models"][0] & { color: string })[], past: Past): Line[] {
  const shown = [["p50", "c5"], ["p95", "c2"], ["p99", "c3"]] as const;
  if (models.length === 1) return shown.map(([name, color]) => ({ name, color, points: series(models[0]!.points, past, (point) => point[name] === null ? null : 1000 * point[name]!, null) }));
  return models.map((model) => ({ name: `${model.name} p95`, color: model.color, points: series(model.points, past, (point) => point.p95 === null ? null : 1000 * point.p95, null) }));
}

function memoryOf(past: Past) {
  const points = past.models.flatMap((model) => model.points).sort((a, b) => b.seconds_ago - a.seconds_ago);
  return [...points.map((point) => ({ ago: point.seconds_ago, value: point.memory / 2 ** 20 })), { ago: 0, value: past.memory / 2 ** 20 }];
}

function Figure({ name, value, more, bad }: { name: string; value: string; more: string; bad?: boolean }) {
  return <div class={bad ? "card figure-card bad" : "card figure-card"}><div class="name">{name}</div><div class="value">{value}</div><div class="more-text">{more}</div></div>;
}

function BatchView() {
  const { found, error } = usePolled<Batch>("v1/live/batch", 1);
  const used = (model: Batch["models"][0]) => model.running.length + model.finished.length > 0;
  const idle = found?.models.filter((model) => !used(model)) ?? [];
  return (
    <Card id="batch" title="The batch" hint="Which slot was taken when, in the last minute: blue is over, orange runs, red failed. A request moves to a lower slot when one becomes free. Its text is never shown.">
      <Problem error={error} />
      {found?.models.filter(used).map((model) => <Lanes key={`${model.name}/${model.version}`} model={model} seconds={found.seconds} />)}
      {idle.length > 0 && <p class="hint idle">No slot taken in the last minute: {idle.map((model) => `${model.name} (${model.slots} slots)`).join(", ")}.</p>}
    </Card>
  );
}

const LANE = 13, LEFT = 46, RIGHT = 1146;

function Lanes({ model, seconds }: { model: Batch["models"][0]; seconds: number }) {
  const lanes = Math.max(4, ...[...model.running, ...model.finished].map((each) => each.slot + 1));
  const taken = model.running.filter((each) => each.ended === null).length;
  const x = (ago: number) => LEFT + (1 - Math.min(1, Math.max(0, ago / seconds))) * (RIGHT - LEFT);
  const height = lanes * LANE + 20;
  const bar = (name: string, slot: number, began: number, ended: number, title: string, key: string) => (
    <rect key={key} class={name} data-slot={slot} x={x(began)} y={slot * LANE + 1.5} width={Math.max(2, x(ended) - x(began))} height={LANE - 3} rx={2}><title>{title}</title></rect>
  );
  return (
    <div>
      <h3>{model.name} <small>{taken} of {model.slots} slots taken</small></h3>
      <div class="table"><svg class="batch" viewBox={`0 0 1160 ${height}`} role="img" aria-label={`${model.name}: ${taken} of ${model.slots} slots taken; the last minute of each`}>
        {Array.from({ length: lanes }, (_, slot) => <g key={slot}><line class="grid" x1={LEFT} x2={RIGHT} y1={(slot + 1) * LANE} y2={(slot + 1) * LANE} />{slot % 4 === 0 && <text x={LEFT - 6} y={slot * LANE + 11} text-anchor="end">{slot}</text>}</g>)}
        {model.finished.map((each, index) => bar(each.outcome === "ok" ? "ok" : "failed", each.slot, each.began, each.ended,
          `slot ${each.slot}: ${((each.began - each.ended) * 1000).toFixed(0)} ms; ${each.tokens} tokens in all, ${each.outcome}`, `f${index}`))}
        {model.running.map((each, index) => bar("running", each.slot, each.began, each.ended ?? 0,
          `slot ${each.slot}: ${each.ended === null ? `since ${each.began.toFixed(1)} s` : "before it moved"}; ${each.tokens} tokens so far, ${each.beams} beams`, `r${index}`))}
        {[60, 45, 30, 15, 0].map((ago) => <text key={ago} x={x(ago)} y={height - 3} text-anchor={ago === 0 ? "end" : ago === 60 ? "start" : "middle"}>{ago ? `−${ago} s` : "now"}</text>)}
      </svg></div>
    </div>
  );
}
