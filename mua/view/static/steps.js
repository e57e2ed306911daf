// The steps of a run, and one step: its groups and their trajectories.
import { useState } from "preact/hooks";
import { Answered, Facts, Table, Verdict, address, duration, figure, go, html, moment, percent, useAnswer, useKeys } from "view/ui";

const SHOWN = 100;

export const Steps = ({ run, version }) => {
  const of = useAnswer("steps", { run }, version);
  const [at, setAt] = useState(0), [first, setFirst] = useState(0);
  const rows = [...(of.data?.steps ?? [])].reverse();
  const shown = rows.slice(first, first + SHOWN);
  const open = (row) => go(["run", run, "step", row.step]);
  useKeys({
    j: () => setAt(Math.min(at + 1, shown.length - 1)), k: () => setAt(Math.max(at - 1, 0)),
    Enter: () => shown[at] && open(shown[at]),
    n: () => first + SHOWN < rows.length && setFirst(first + SHOWN), p: () => setFirst(Math.max(0, first - SHOWN)),
  });
  return html`<${Answered} of=${of}>${() => html`
    <h1>Steps of <a href=${address(["run", run])}>${run}</a></h1>
    <p class="dim">${figure(rows.length)} steps, newest first${rows.length > SHOWN ? `, ${first + 1} to ${first + shown.length} (n, p)` : ""}</p>
    <${Table} name="steps" rows=${shown} selected=${at} onOpen=${open} columns=${[
      { name: "step", right: true, cell: (r) => html`<a href=${address(["run", run, "step", r.step])}>${r.step}</a>` },
      { name: "part", right: true, cell: (r) => figure(r.part) },
      { name: "state", cell: (r) => (r.lost ? html`<span class="mark lost">lost</span>` : r.state) },
      { name: "trajectories", right: true, cell: (r) => figure(r.trajectories) },
      { name: "trained tokens", right: true, cell: (r) => figure(r.tokens) },
      { name: "success", right: true, cell: (r) => percent(r["rollout/success"]) },
      { name: "reward", right: true, cell: (r) => figure(r["rollout/reward/mean"], 3) },
      { name: "loss", right: true, cell: (r) => figure(r["train/loss"], 3) },
      { name: "gradient norm", right: true, cell: (r) => figure(r["train/grad_norm"], 3) },
      { name: "ended (UTC)", cell: (r) => moment(r.ended_at) },
      { name: "time", right: true, cell: (r) => duration(r.ended_at ? r.ended_at - r.started_at : null) },
    ]} />`}<//>`;
};

const Group = ({ run, group }) => html`
  <section class="group">
    <h3>group ${group.ordinal} <span class="dim">${group.domain} · ${group.kind} · ${group.task}</span>
      ${!group.trained && html`<span class="mark lost" title="a filter left it out">not trained on</span>`}</h3>
    <${Table} name="group" rows=${group.trajectories} onOpen=${(r) => go(["run", run, "t", r.id])} columns=${[
      { name: "sample", right: true, cell: (r) => html`<a href=${address(["run", run, "t", r.id])}>${r.sample}</a>` },
      { name: "", cell: (r) => html`<${Verdict} row=${r} />` },
      { name: "outcome", cell: (r) => r.outcome },
      { name: "reward", right: true, cell: (r) => figure(r.reward, 4) },
      { name: "turns", right: true, cell: (r) => figure(r.turns) },
      { name: "sampled tokens", right: true, cell: (r) => figure(r.sampled_tokens) },
    ]} />
  </section>`;

export const Step = ({ run, step, version }) => {
  const of = useAnswer("step", { run, step }, version);
  const at = Number(step);
  useKeys({
    "[": () => at > 0 && go(["run", run, "step", at - 1]), "]": () => go(["run", run, "step", at + 1]),
    l: () => go(["run", run, "trajectories"], { step }),
  });
  return html`
    <h1><a href=${address(["run", run])}>${run}</a> · step ${step}
      <a class="next" href=${address(["run", run, "step", Math.max(0, at - 1)])} title="earlier: [">‹</a>
      <a class="next" href=${address(["run", run, "step", at + 1])} title="later: ]">›</a></h1>
    <${Answered} of=${of}>${(data) => html`
      ${data.rows.map((row) => html`<p class="dim">part ${row.part}, ${row.lost ? "lost" : row.state}, policy version ${row.version},
        ended ${moment(row.ended_at)} UTC${row.gradient ? `, gradient ${row.gradient}` : ""}</p>`)}
      <p><a href=${address(["run", run, "trajectories"], { step })}>Its trajectories as a list</a></p>
      ${data.groups.map((group) => html`<${Group} run=${run} group=${group} />`)}
      <details><summary>Metrics</summary><${Facts} of=${Object.entries(data.metrics).sort()} /></details>`}<//>`;
};
