"use strict";
/* The report as a page. All data are in the page itself; nothing is ever fetched. */

(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const {draw, html} = Chart;
  const $ = (selector) => document.querySelector(selector);

  const digits = (v) => (Math.abs(v) < 10 ? v.toFixed(2) : Math.abs(v) < 100 ? v.toFixed(1) : v.toFixed(0));
  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  const time = (v) => {
    if (v === null || v === undefined) return "–";
    if (v === 0) return "0";
    const a = Math.abs(v);
    return a >= 60 ? `${(v / 60).toFixed(1)} min` : a >= 1 ? `${v.toFixed(2)} s`
      : a >= 1e-3 ? `${digits(v * 1e3)} ms` : `${digits(v * 1e6)} µs`;
  };
  const timeTick = (v) => { const [number, unit] = time(v).split(" "); return unit ? `${trim(number)} ${unit}` : number; };
  const rate = (v) => (v === null || v === undefined ? "–" : `${trim(digits(v))}/s`);
  const percent = (v) => `${trim((100 * v).toFixed(v && v < 0.1 ? 2 : 1))} %`;
  const plain = (v) => trim(digits(v));
  const name = (share) => `p${+(100 * share).toFixed(4)}`;
  const interval = (i, show) => (i ? `${show(i.low)} to ${show(i.high)}` : "");
  const percentileOf = (d, share) => (d ? d.percentiles.find((p) => p.share === share) : undefined);
  const valueOf = (d, share) => { const p = percentileOf(d, share); return p ? p.seconds : null; };
  const bounded = (p) => (p ? `${p.at_least ? "≥ " : ""}${time(p.seconds)}` : "–");

  /* -- the head ----------------------------------------------------------------------------------------------- */

  const alert = (text, bad) => $("#alerts").append(html("div", bad ? "alert bad" : "alert", text));

  function head() {
    const setup = report.setup;
    $("h1").textContent = report.title;
    const models = setup.models.map((m) => m || "default model").join(", ");
    $("#subtitle").textContent = [`${models} at ${setup.target}`, setup.workload, `${report.created.slice(0, 16).replace("T", " ")} UTC`].join(" · ");
    for (const gate of report.gates)
      if (gate.failed) alert(`Failed: ${gate.expression} – measured ${gate.measured}`, true);
    if (report.search) {
      alert(`Result: ${report.search.conclusion}.`, report.search.rate === null);
    }
    if (report.not_run.length) alert(`Not run: ${report.not_run.join(", ")}`, true);
    $("footer").textContent = `${setup.command} · seed ${setup.seed}, ${setup.workers} ${setup.workers > 1 ? "processes" : "process"}, ` +
      `${setup.workers * setup.channels} connections, deadline ${time(setup.deadline)} · beamline ${report.machine.beamline}, ` +
      `Python ${report.machine.python}, ${report.machine.cpus} CPUs, ${report.machine.system}`;
  }

  /* -- all stages --------------------------------------------------------------------------------------------- */

  function table(titles, rows, marked = -1) {
    const node = html("table"), first = html("tr");
    first.append(...titles.map((title) => html("th", "", title)));
    node.append(first);
    rows.forEach((cells, index) => {
      const row = html("tr", index === marked ? "marked" : "");
      row.append(...cells.map((cell) => html("td", "", cell)));
      node.append(row);
    });
    return node;
  }
  function titled(title, content) {
    const box = html("div", "table");
    box.append(html("h2", "", title), content);
    return box;
  }

  function overview(choose) {
    if (report.stages.length < 2) return;
    $("#overview").hidden = false;
    const load = (s) => s.offered_rate ?? s.throughput;  // an overloaded server answers less, so the curve may turn back
    const byLoad = [...report.stages].sort((a, b) => load(a) - load(b));
    const line = (share, color) => ({
      name: name(share), color, kind: "dots", points: byLoad.map((s) => [s.throughput, valueOf(s.latency, share)]),
    });
    $("#sweep").append(draw({
      title: "Throughput against latency", note: "one point per stage: what it answered, and how fast",
      x: {label: "answered per second", scale: "linear", format: plain, from0: true, tip: rate},
      y: {scale: "log", format: timeTick},
      series: [line(0.5, "c1"), line(0.95, "c2"), line(0.99, "c3")],
    }));
    const rows = report.stages.map((s) => [
      s.offered_rate === null ? s.arrivals : rate(s.offered_rate), rate(s.sent_rate), rate(s.throughput),
      ...[0.5, 0.95, 0.99].map((q) => bounded(percentileOf(s.latency, q))),
      s.sent ? percent(s.failed / s.sent) : "–", s.client.saturated ? "saturated" : "fine",
    ]);
    const box = $("#stages");
    box.className = "table";
    box.append(html("h2", "", "Stages, in the order they ran"),
      table(["offered", "sent", "answered", "p50", "p95", "p99", "failed", "load tester"], rows, report.search ? report.search.stage : -1));
    const select = $("#choice select");
    $("#choice").hidden = false;
    report.stages.forEach((s, i) => {
      const option = html("option", "", `${i + 1}: ${s.arrivals}`);
      option.value = i;
      select.append(option);
    });
    select.addEventListener("change", () => choose(Number(select.value)));
  }

  /* -- one stage ---------------------------------------------------------------------------------------------- */

  function cards(stage) {
    const card = (title, value, more = "", bad = false) => {
      const box = html("div", bad ? "card bad" : "card");
      box.append(html("div", "name", title), html("div", "value", value), html("div", "more", more));
      return box;
    };
    const latency = (share) => {
      const p = percentileOf(stage.latency, share);
      return card(`${name(share)} latency`, bounded(p), p ? interval(p.interval, time) : "too few requests");
    };
    const sent = `${stage.offered_rate === null ? "" : `offered ${rate(stage.offered_rate)}, `}sent ${rate(stage.sent_rate)}`;
    return [
      card("Throughput", rate(stage.throughput), [interval(stage.throughput_interval, rate), sent].filter(Boolean).join("; ")),
      latency(0.5), latency(0.95), latency(0.99),
      card("Failed", stage.sent ? percent(stage.failed / stage.sent) : "–", `${stage.failed} of ${stage.sent}${stage.unfinished ? `, ${stage.unfinished} not finished` : ""}`, stage.failed > 0),
      card("Load tester", stage.client.saturated ? "saturated" : "fine",
        stage.client.send_lag_p99 === null ? `${percent(stage.client.busiest_worker)} of a core`
          : `p99 send lag ${time(stage.client.send_lag_p99)}`, stage.client.saturated),
    ];
  }

  function plots(stage) {
    const t = (label = "seconds since the start") => ({label, scale: "linear", format: plain, from0: true, tip: (v) => `${plain(v)} s`});
    const shades = stage.warmup ? [[0, stage.warmup, "warm-up"]] : [];
    const bins = stage.timeline, middle = (b) => b.start + b.seconds / 2;
    const over = (field) => bins.map((b) => [middle(b), b[field]]);
    const found = [{
      title: "Latency over time", note: "by the time at which a request should have been sent", x: t(), shades,
      y: {scale: "log", format: timeTick},
      series: [
        {name: "max", color: "c4", thin: true, points: over("maximum")}, {name: "p99", color: "c3", points: over("p99")},
        {name: "p95", color: "c2", points: over("p95")}, {name: "p50", color: "c1", points: over("p50")},
      ],
    }, {
      title: "Rate over time", note: "what was sent, and what came back", x: t(), shades,
      y: {scale: "linear", format: rate, from0: true},
      series: [
        {name: "sent", color: "c4", points: bins.map((b) => [middle(b), b.sent / b.seconds])},
        {name: "answered", color: "c1", points: bins.map((b) => [middle(b), b.answered / b.seconds])},
        ...(bins.some((b) => b.failed) ? [{name: "failed", color: "c3", points: bins.map((b) => [middle(b), b.failed / b.seconds])}] : []),
      ],
    }, percentiles(stage), histogram(stage)];
    if (stage.first_token) found.push(distributionCurve("Time to first token", stage.first_token));
    if (stage.token_gap) found.push(distributionCurve("Gap between tokens", stage.token_gap));
    found.push(...server(stage, t, shades, over));
    return found;
  }

  const nines = [0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 0.99999, 0.999999];
  const nineOf = (share) => -Math.log10(1 - share);
  function percentiles(stage) {
    const points = stage.curve.filter((p) => p.share < 1).map((p) => [nineOf(p.share), p.seconds]);
    const last = points.length ? points.at(-1)[0] : 1;
    return {
      title: "Latency by percentile", note: "the axis stretches towards the slowest requests",
      x: {
        label: "percentile", scale: "linear", ticks: nines.map(nineOf).filter((v) => v <= last + 1e-9),
        format: (v) => `${+(100 * (1 - 10 ** -v)).toFixed(5)}`, tip: (v) => `p${+(100 * (1 - 10 ** -v)).toFixed(3)}`,
      },
      y: {scale: "linear", format: timeTick, from0: true}, series: [{name: "latency", color: "c1", points}],
    };
  }

  /* Buckets are 1.1 % wide; enough of them are joined for about 60 bars. */
  function histogram(stage) {
    const {buckets, counts} = stage.histogram || {buckets: [], counts: []}, bars = new Map();
    const width = buckets.length ? Math.max(1, Math.ceil((buckets.at(-1) - buckets[0] + 1) / 60)) : 1;
    buckets.forEach((bucket, i) => {
      const bar = Math.floor(bucket / width) * width;
      bars.set(bar, (bars.get(bar) || 0) + counts[i]);
    });
    const edge = (bucket) => 1e-6 * 2 ** (bucket / 64);
    const points = [...bars].sort((a, b) => a[0] - b[0]).map(([bar, n]) => [edge(bar), n, edge(bar + width)]);
    return {
      title: "Histogram", note: `${counts.reduce((a, b) => a + b, 0)} requests`,
      x: {label: "latency", scale: "log", format: timeTick}, y: {scale: "linear", format: plain, from0: true},
      series: [{name: "requests", color: "c1", kind: "bars", points}],
    };
  }

  const distributionCurve = (title, distribution) => ({
    title, note: `${distribution.count} measured`,
    x: {label: "percentile", scale: "linear", ticks: distribution.percentiles.map((p) => nineOf(p.share)),
      format: (v) => `${+(100 * (1 - 10 ** -v)).toFixed(3)}`},
    y: {scale: "linear", format: timeTick, from0: true},
    series: [{name: title.toLowerCase(), color: "c1", kind: "dots", points: distribution.percentiles.map((p) => [nineOf(p.share), p.seconds])}],
  });

  function server(stage, t, shades, over) {
    const models = [...new Set(stage.server.map((s) => s.model))], colors = ["c1", "c2", "c5", "c3"];
    const of = (model, value) => stage.server.filter((s) => s.model === model).map((s) => [s.at, value(s)]);
    const label = (model, what) => (models.length > 1 ? `${what}, ${model}` : what);
    const queue = {
      title: "Queue", note: models.length ? "in flight: seen from the client; waiting: the server's /metrics"
        : "in flight, seen from the client; give --metrics for the server's own queue",
      x: t(), shades, y: {scale: "linear", format: plain, from0: true, to: 1},
      series: [{name: "in flight", color: "c4", points: over("in_flight")},
        ...models.map((m, i) => ({name: label(m, "waiting"), color: colors[i % 4], points: of(m, (s) => s.queue_length)}))],
    };
    if (!models.length) return [queue];
    return [queue, {
      title: "Batch occupancy", note: "share of the slots that the steps between two scrapes used", x: t(), shades,
      y: {scale: "linear", format: percent, from0: true, to: 1},
      series: models.map((m, i) => ({name: label(m, "slots in use"), color: colors[i % 4], points: of(m, (s) => s.occupancy)})),
    }];
  }

  function tables(stage) {
    const rows = [];
    for (const [title, d] of [["latency", stage.latency], ...stage.by_model.map((m) => [`latency, ${m.model}`, m.latency]),
      ["first token", stage.first_token], ["token gap", stage.token_gap], ["server's queue", stage.server_queue]]) {
      if (!d) continue;
      rows.push([title, time(d.mean), ...[0.5, 0.75, 0.9, 0.95, 0.99, 0.999].map((q) => bounded(percentileOf(d, q))), time(d.maximum)]);
    }
    const wide = titled("Durations", table(["", "mean", "p50", "p75", "p90", "p95", "p99", "p99.9", "max"], rows));
    const pair = html("div", "pair");
    const client = stage.client;
    pair.append(
      titled("Statuses", table(["status", "requests", "first detail"], [
        ...stage.statuses.map((s) => [s.status, s.count, s.detail]),
        ...stage.after.map((s) => [`${s.status}, after the measured time`, s.count, s.detail])])),
      titled("Load tester", table(["", ""], [
        ["send lag, p50 / p99 / max", [client.send_lag_p50, client.send_lag_p99, client.send_lag_max].map(time).join(" / ")],
        ["event loop lag, p99", time(client.loop_lag_p99)],
        ["busiest process", `${percent(client.busiest_worker)} of a core`],
        ["this machine", client.machine_busy === null ? "–" : `${percent(client.machine_busy)} busy`],
      ])));
    return [wide, pair];
  }

  function show(index) {
    const stage = report.stages[index];
    $("#cards").replaceChildren(...cards(stage));
    $("#plots").replaceChildren(...plots(stage).map(draw));
    $("#tables").replaceChildren(...tables(stage));
    document.querySelectorAll(".alert.stage").forEach((node) => node.remove());
    const tell = (text, bad) => { alert(text, bad); $("#alerts").lastChild.classList.add("stage"); };
    if (stage.stopped) tell(`Stopped early: ${stage.stopped}`, true);
    for (const reason of stage.client.reasons) tell(`The load tester is the bottleneck: ${reason}`, true);
    for (const note of stage.notes) tell(note[0].toUpperCase() + note.slice(1), false);
  }

  head();
  overview(show);
  if (report.stages.length) {
    const first = report.search && report.search.stage !== null ? report.search.stage : report.stages.length - 1;
    if (report.stages.length > 1) $("#choice select").value = first;
    show(first);
  }
  document.body.dataset.ready = "true";
})();
