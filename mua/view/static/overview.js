// The list of runs, and one run as a whole.
import { useState } from "preact/hooks";
import { Chart } from "view/charts";
import { Answered, Bar, Facts, Table, address, counted, duration, figure, go, html, moment, percent, useAnswer, useKeys } from "view/ui";

export const Runs = ({ version }) => {
  const of = useAnswer("runs", {}, version);
  const [at, setAt] = useState(0);
  const rows = of.data?.runs ?? [];
  const open = (row) => go(["run", row.key]);
  useKeys({
    j: () => setAt(Math.min(at + 1, rows.length - 1)), k: () => setAt(Math.max(at - 1, 0)),
    Enter: () => rows[at] && open(rows[at]),
    c: () => rows.length > 1 && go(["compare"], { a: rows[1].key, b: rows[0].key }),
  });
  const columns = [
    { name: "run", cell: (r) => html`<a href=${address(["run", r.key])}>${r.key}</a>` },
    { name: "name", cell: (r) => r.name ?? "–" },
    { name: "state", cell: (r) => html`<span class=${`mark ${r.state}`}>${r.state}</span>` },
    { name: "began (UTC)", cell: (r) => moment(r.started_at) },
    { name: "time", right: true, cell: (r) => duration(r.ended_at ? r.ended_at - r.started_at : null) },
    { name: "starts", right: true, cell: (r) => counted(r.parts) },
    { name: "steps", right: true, cell: (r) => counted(r.steps) },
    { name: "tasks", right: true, cell: (r) => counted(r.tasks) },
    { name: "trajectories", right: true, cell: (r) => counted(r.trajectories) },
    { name: "store", cell: (r) => html`<span class="dim">${r.store}</span>` },
  ];
  return html`<${Answered} of=${of}>${() => html`
    <h1>Runs</h1>
    <${Table} name="runs" columns=${columns} rows=${rows} selected=${at} onOpen=${open} />
    ${rows.length > 1 && html`<p><a href=${address(["compare"], { a: rows[1].key, b: rows[0].key })}>Compare two runs</a></p>`}
  `}<//>`;
};

// Held-out curves, one a split and domain: x is the policy version, which is the number of steps behind it.
const heldOut = (evaluations) => {
  const found = new Map();
  for (const one of evaluations) {
    const several = Object.keys(one.domains).length > 1;
    const parts = [[one.split ?? "held out", one.success], ...(several ? Object.entries(one.domains).map(([d, i]) => [`${one.split} ${d}`, i]) : [])];
    for (const [name, interval] of parts) {
      if (!interval || one.version === null) continue;
      if (!found.has(name)) found.set(name, { name, steps: [], values: [], low: [], high: [] });
      const curve = found.get(name);
      curve.steps.push(one.version);
      curve.values.push(interval.mean);
      curve.low.push(interval.low);
      curve.high.push(interval.high);
    }
  }
  return [...found.values()];
};

const ofKinds = (evaluations) => {
  const found = new Map();
  for (const one of evaluations) {
    if (one.version === null) continue;
    for (const [kind, interval] of Object.entries(one.kinds)) {
      if (!found.has(kind)) found.set(kind, { name: kind, steps: [], values: [] });
      found.get(kind).steps.push(one.version);
      found.get(kind).values.push(interval.mean);
    }
  }
  return [...found.values()];
};

const Evaluations = ({ run, evaluations }) => {
  const newest = evaluations[evaluations.length - 1];
  const kinds = Object.entries(newest.kinds);
  const first = evaluations.find((one) => one.split === newest.split);
  return html`
    <h2>Success by kind of task</h2>
    <p class="dim">Held-out (${newest.split ?? "?"}), policy version ${figure(newest.version)} against ${figure(first.version)}. Intervals: ${percent(newest.level)}, tasks resampled.</p>
    <${Table} name="kinds" rows=${kinds} onOpen=${([kind]) => go(["run", run, "trajectories"], { round: newest.round, kind })} columns=${[
      { name: "kind", cell: ([kind]) => kind },
      { name: "tasks", right: true, cell: ([, i]) => figure(i.tasks) },
      { name: "success", right: true, cell: ([, i]) => percent(i.mean) },
      { name: "", cell: ([, i]) => html`<${Bar} share=${i.mean} />` },
      { name: "interval", right: true, cell: ([, i]) => `${percent(i.low)} to ${percent(i.high)}` },
      { name: "at first", right: true, cell: ([kind]) => percent(first.kinds[kind]?.mean) },
    ]} />`;
};

const Stages = ({ title, stages, theme, onPoint }) => {
  const names = Object.keys(stages);
  if (!names.length) return null;
  const series = names.map((name) => ({
    name: name.replace(/^time\/(episode_)?/, "").replace(/_seconds$/, ""), steps: stages[name][0], values: stages[name][1],
  }));
  return html`<${Chart} title=${title} series=${series} theme=${theme} onPoint=${onPoint} />`;
};

const Curves = ({ run, overview, theme, version }) => {
  const [more, setMore] = useState("");
  const extra = useAnswer("curves", { run, names: more || "step" }, version);
  const all = { ...overview.curves, ...(more && extra.data ? extra.data.curves : {}) };
  const onPoint = (step) => go(["run", run, "step", step]);
  return html`
    <h2>Training <select aria-label="another curve" value=${more} onChange=${(e) => setMore(e.target.value)}>
      <option value="">another curve …</option>
      ${overview.metric_names.map((name) => html`<option value=${name} title=${overview.meanings[name]}>${name}</option>`)}
    </select></h2>
    <div class="charts">${Object.entries(all).map(([name, [steps, values]]) => html`
      <${Chart} key=${name} title=${name} about=${overview.meanings[name]} series=${[{ name, steps, values }]} theme=${theme} onPoint=${onPoint} />`)}</div>`;
};

export const Overview = ({ run, version, theme }) => {
  const of = useAnswer("run", { run }, version);
  useKeys({ s: () => go(["run", run, "steps"]), l: () => go(["run", run, "trajectories"]) });
  const list = (query) => go(["run", run, "trajectories"], query);
  const step = (at) => go(["run", run, "step", at]);
  return html`<${Answered} of=${of}>${(data) => {
    const curves = heldOut(data.evaluations);
    const round = (at) => {
      const near = data.evaluations.find((one) => one.version === at);
      if (near) list({ round: near.round });
    };
    const unit = [0, 1];
    return html`
      <h1>${run} <span class=${`mark ${data.run.state}`}>${data.run.state}</span></h1>
      <p class="dim">${data.run.name ?? ""} · began ${moment(data.run.started_at)} UTC · ${figure(data.state.step === null ? 0 : data.state.step + 1)} steps ·
        <a href=${address(["run", run, "trajectories"])}>${counted(data.state.trajectories)} trajectories</a> · ${data.run.output}</p>
      ${curves.length > 0 && html`
        <h2>Held-out success</h2>
        <div class="charts">
          <${Chart} title="held-out success" series=${curves} range=${unit} theme=${theme} onPoint=${round} x="policy version" height=${240} />
          <${Chart} title="by kind of task" series=${ofKinds(data.evaluations)} range=${unit} theme=${theme} onPoint=${round} x="policy version" height=${240} />
        </div>
        <${Evaluations} run=${run} evaluations=${data.evaluations} />`}
      <${Curves} run=${run} overview=${data} theme=${theme} version=${version} />
      <h2>Time of each stage</h2>
      <div class="charts">
        <${Stages} title="trainer: seconds of a step" stages=${data.stages.trainer} theme=${theme} onPoint=${step} />
        <${Stages} title="episode: mean seconds" stages=${data.stages.episode} theme=${theme} onPoint=${step} />
      </div>
      <div class="beside">
        <section><h2>Success in training</h2>
          <${Table} name="training_kinds" rows=${data.kinds} onOpen=${(r) => list({ round: 0, domain: r.domain, kind: r.kind === "-" ? "" : r.kind })} columns=${[
            { name: "domain", cell: (r) => r.domain }, { name: "kind", cell: (r) => r.kind },
            { name: "episodes", right: true, cell: (r) => figure(r.episodes) },
            { name: "success", right: true, cell: (r) => percent(r.scored ? r.won / r.scored : null) },
            { name: "reward", right: true, cell: (r) => figure(r.reward, 3) },
          ]} /></section>
        <section><h2>Outcomes</h2>
          <${Table} name="outcomes" rows=${data.outcomes} onOpen=${(r) => list({ outcome: r.outcome, round: r.evaluation ? "" : 0 })} columns=${[
            { name: "outcome", cell: (r) => html`<span class=${r.scored ? "" : "fault"}>${r.outcome}</span>` },
            { name: "where", cell: (r) => (r.evaluation ? "evaluation" : "training") },
            { name: "episodes", right: true, cell: (r) => figure(r.episodes) },
            { name: "successes", right: true, cell: (r) => figure(r.won) },
          ]} /></section>
        <section><h2>Tools</h2>
          <${Table} name="tools" rows=${data.tools} onOpen=${(r) => list({ text: r.name, tool_error: r.errors ? "true" : "" })} columns=${[
            { name: "tool", cell: (r) => r.name }, { name: "by", cell: (r) => (r.by_user ? "user" : "policy") },
            { name: "calls", right: true, cell: (r) => figure(r.calls) },
            { name: "errors", right: true, cell: (r) => html`<span class=${r.errors ? "fault" : ""}>${figure(r.errors)}</span>` },
            { name: "mean time", right: true, cell: (r) => duration(r.seconds) },
          ]} /></section>
        <section><h2>Requests</h2>
          <${Table} name="endpoints" rows=${data.endpoints} columns=${[
            { name: "role", cell: (r) => r.role }, { name: "endpoint", cell: (r) => r.endpoint ?? "–" },
            { name: "requests", right: true, cell: (r) => figure(r.requests) },
            { name: "errors", right: true, cell: (r) => html`<span class=${r.errors ? "fault" : ""}>${figure(r.errors)}</span>` },
            { name: "mean time", right: true, cell: (r) => duration(r.seconds) },
            { name: "tokens", right: true, cell: (r) => figure(r.tokens) },
          ]} /></section>
      </div>
      <h2>Events</h2>
      <${Table} name="events" rows=${data.events} onOpen=${(e) => (e.trajectory ? go(["run", run, "t", e.trajectory]) : e.step !== null && step(e.step))} columns=${[
        { name: "when (UTC)", cell: (e) => moment(e.at) }, { name: "step", right: true, cell: (e) => figure(e.step) },
        { name: "what", cell: (e) => html`<span class=${`mark ${e.kind}`}>${e.kind}</span>` }, { name: "", cell: (e) => e.text },
      ]} />
      <details><summary>Configuration and provenance</summary>
        <${Facts} of=${Object.entries(data.config)} /><${Facts} of=${Object.entries(data.run.provenance ?? {})} /></details>`;
  }}<//>`;
};
