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
  models: { name: string; version: string; slots: number; running: { slot: number; began: number; beams: number; tokens: number }[];
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

export function Live() {
  const { found: past, error } = usePolled<Past>("v1/live", 2);
  const [only, setOnly] = useState("");
  if (!past) return <div class="stack"><Problem error={error} /></div>;
  const key = (model: { name: string; version: string }) => `${model.name}/${model.version}`;
  const models = past.models.filter((model) => !only || key(model) === only);
  const seconds = past.bins * past.bin_seconds;
  const each = (value: (point: Point) => number | null, idle: number | null): Line[] =>
    models.map((model, index) => ({ name: model.name, color: COLORS[index % 5]!, points: series(model.points, past, value, idle) }));
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
        <Figure name="requests" value={(sum((point) => point.requests) / 10).toFixed(1)} more="a second, of the last ten" />
        <Figure name="tokens" value={(sum((point) => point.tokens) / 10).toFixed(0)} more="written a second" />
        <Figure name="slots" value={`${active} of ${slots}`} more="taken at once" />
        <Figure name="queue" value={String(now.reduce((total, point) => total + (point?.queued ?? 0), 0))} more="requests wait" />
        <Figure name="p95" value={p95 ? `${(1000 * p95).toFixed(0)} ms` : "–"} more="from submission to answer" />
        <Figure name="failed" value={String(sum((point) => point.failed))} more="in ten seconds" bad={sum((point) => point.failed) > 0} />
        <Figure name="memory" value={memory ? `${memory.toFixed(0)} MiB` : "–"} more="of the process" />
      </div>
      <div class="plots">
        <Chart title="Requests a second" hint="answered or failed" seconds={seconds} lines={each((point) => point.requests / past.bin_seconds, 0)} />
        <Chart title="Tokens a second" hint="of the best hypotheses" seconds={seconds} lines={each((point) => point.tokens / past.bin_seconds, 0)} />
        <Chart title="Slots taken" hint="the most at once" seconds={seconds} whole lines={each((point) => point.active, 0)} />
        <Chart title="Occupancy" hint="share of the slots that a step used, on average" unit=" %" seconds={seconds} lines={models.map((model, index) => ({ name: model.name, color: COLORS[index % 5]!, points: series(model.points, past, (point) => (100 * point.mean_active) / model.slots, 0) }))} />
        <Chart title="Queue" hint="the most that waited" seconds={seconds} whole lines={each((point) => point.queued, 0)} />
        <Chart title="Step" hint="mean time of a step" unit=" ms" seconds={seconds} lines={each((point) => (point.steps ? (1000 * point.step_seconds) / point.steps : null), null)} />
        <Chart title="Latency" hint="from submission to answer; a percentile looks back ten seconds" unit=" ms" seconds={seconds} lines={latencies(models, past)} />
        <Chart title="Memory" hint="of the whole process" unit=" MiB" seconds={seconds} lines={[{ name: "resident", color: "c4", points: memoryOf(past) }]} />
      </div>
      <BatchView />
    </div>
  );
}

function latencies(models: Past["models"], past: Past): Line[] {
  const shown = [["p50", "c5"], ["p95", "c2"], ["p99", "c3"]] as const;
  if (models.length === 1) return shown.map(([name, color]) => ({ name, color, points: series(models[0]!.points, past, (point) => point[name] === null ? null : 1000 * point[name]!, null) }));
  return models.map((model, index) => ({ name: `${model.name} p95`, color: COLORS[index % 5]!, points: series(model.points, past, (point) => point.p95 === null ? null : 1000 * point.p95, null) }));
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
  const lane = 13;
  return (
    <Card id="batch" title="The batch" hint="Which slot was taken when, in the last minute. A request’s text is never shown.">
      <Problem error={error} />
      {found?.models.map((model) => {
        const used = [...model.running.map((each) => each.slot), ...model.finished.map((each) => each.slot)];
        const lanes = Math.max(4, ...used.map((slot) => slot + 1));
        const x = (ago: number) => 46 + (1 - Math.min(1, Math.max(0, ago / found.seconds))) * 1100;
        const height = lanes * lane + 20;
        return <div key={`${model.name}/${model.version}`}>
          <h3>{model.name} <small>{model.running.length} of {model.slots} slots taken</small></h3>
          <svg class="batch" viewBox={`0 0 1160 ${height}`} role="img" aria-label={`${model.name}: ${model.running.length} of ${model.slots} slots taken, ${model.finished.length} requests ended in the last minute`}>
            {Array.from({ length: lanes }, (_, slot) => <g key={slot}><line class="grid" x1={46} x2={1146} y1={slot * lane + lane} y2={slot * lane + lane} />{slot % 4 === 0 && <text x={40} y={slot * lane + 11} text-anchor="end">{slot}</text>}</g>)}
            {model.finished.map((each, index) => <rect key={index} class={each.outcome === "ok" ? "ok" : "failed"} x={x(each.began)} y={each.slot * lane + 1.5} width={Math.max(2, x(each.ended) - x(each.began))} height={lane - 3} rx={2}><title>{`slot ${each.slot}: ${((each.began - each.ended) * 1000).toFixed(0)} ms, ${each.tokens} tokens, ${each.outcome}`}</title></rect>)}
            {model.running.map((each) => <rect key={`r${each.slot}`} class="running" x={x(each.began)} y={each.slot * lane + 1.5} width={Math.max(3, 1146 - x(each.began))} height={lane - 3} rx={2}><title>{`slot ${each.slot}: since ${each.began.toFixed(1)} s, ${each.tokens} tokens, ${each.beams} beams`}</title></rect>)}
            {[60, 45, 30, 15, 0].map((ago) => <text key={ago} x={x(ago)} y={height - 3} text-anchor={ago === 0 ? "end" : "middle"}>{ago ? `−${ago} s` : "now"}</text>)}
          </svg>
        </div>;
      })}
    </Card>
  );
}
