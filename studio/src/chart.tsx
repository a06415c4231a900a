// Lines over the last ten minutes, in the look of the load tester's report.
import { useRef, useState } from "preact/hooks";

export interface Line { name: string; color: string; points: { ago: number; value: number | null }[] }
const W = 560, H = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;

function nice(most: number): number[] {
  const rough = most / 4 || 0.25;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough)!;
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 || 2 }, (_, index) => index * step);
}

export function Chart({ title, hint, lines, seconds, unit = "", whole = false }: {
  title: string; hint: string; lines: Line[]; seconds: number; unit?: string; whole?: boolean;
}) {
  const [ago, setAgo] = useState<number | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const most = Math.max(whole ? 1 : 0, ...lines.flatMap((line) => line.points.map((point) => point.value ?? 0)));
  const ticks = nice(most || 1);
  const top = ticks.at(-1)!;
  const x = (value: number) => LEFT + (1 - value / seconds) * (W - LEFT - RIGHT);
  const y = (value: number) => TOP + (1 - value / top) * (H - TOP - BOTTOM);
  const show = (value: number) => `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : Number(value.toFixed(2))}${unit}`;
  const move = (event: MouseEvent) => {
    const box = svg.current!.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * W;
    setAgo(inside < LEFT ? null : Math.max(0, (1 - (inside - LEFT) / (W - LEFT - RIGHT)) * seconds));
  };
  const near = (line: Line) => ago === null ? line.points.findLast((point) => point.value !== null)
    : line.points.reduce<Line["points"][0] | undefined>((best, point) => (!best || Math.abs(point.ago - ago) < Math.abs(best.ago - ago) ? point : best), undefined);
  return (
    <section class="card plot" aria-label={title}>
      <h2>{title}</h2><p class="hint">{hint}</p>
      <div class="legend">{lines.map((line) => {
        const point = near(line);
        return <span key={line.name}><i class={line.color} />{line.name}{point?.value !== null && point?.value !== undefined && <b> {show(point.value)}</b>}</span>;
      })}{ago !== null && <span class="ago">{clock(ago)}</span>}</div>
      <svg ref={svg} viewBox={`0 0 ${W} ${H}`} role="img" aria-label={`${title}: ${lines.map((line) => `${line.name} ${show(near(line)?.value ?? 0)}`).join(", ")}`}
        onMouseMove={move} onMouseLeave={() => setAgo(null)}>
        {ticks.map((tick) => <g key={tick}><line class="grid" x1={LEFT} x2={W - RIGHT} y1={y(tick)} y2={y(tick)} /><text x={LEFT - 6} y={y(tick) + 4} text-anchor="end">{show(tick)}</text></g>)}
        {[600, 450, 300, 150, 0].filter((each) => each <= seconds).map((each) => <text key={each} x={x(each)} y={H - 5} text-anchor={each === 0 ? "end" : each === seconds ? "start" : "middle"}>{each === 0 ? "now" : `−${each / 60} min`}</text>)}
        {lines.map((line) => <path key={line.name} class={`line ${line.color}`} d={pathOf(line, x, y)} />)}
        {ago !== null && <line class="cursor" x1={x(ago)} x2={x(ago)} y1={TOP} y2={H - BOTTOM} />}
      </svg>
    </section>
  );
}

const clock = (ago: number) => new Date(Date.now() - 1000 * ago).toLocaleTimeString();

function pathOf(line: Line, x: (value: number) => number, y: (value: number) => number): string {
  let path = "", open = false;
  for (const point of line.points) {
    if (point.value === null) { open = false; continue; }
    path += `${open ? "L" : "M"}${x(point.ago).toFixed(1)} ${y(point.value).toFixed(1)}${open ? "" : "h.1"}`; // a lone point is a dot
    open = true;
  }
  return path;
}
