// Two runs side by side on the tasks that both met.
import { Chart } from "view/charts";
import { Answered, Table, address, figure, go, html, percent, useAnswer } from "view/ui";

const Side = ({ name, runs, query, evaluations, change }) => html`
  <span class="side">
    <select aria-label=${`run ${name}`} name=${name} value=${query[name]} onChange=${(e) => change({ [name]: e.target.value, [`r${name}`]: "" })}>
      ${runs.map((run) => html`<option value=${run.key}>${run.key}</option>`)}</select>
    <select aria-label=${`round ${name}`} value=${query[`r${name}`]} onChange=${(e) => change({ [`r${name}`]: e.target.value })}>
      <option value="0">training</option>
      ${evaluations.map((e) => html`<option value=${e.round}>evaluation ${e.round}, ${e.split ?? ""} version ${e.version ?? "?"}</option>`)}</select>
  </span>`;

const curve = (name, evaluations) => {
  const known = evaluations.filter((e) => e.version !== null && e.success);
  const of = (key) => known.map((e) => e.success[key]);
  return { name, steps: known.map((e) => e.version), values: of("mean"), low: of("low"), high: of("high") };
};

export const Compare = ({ query, version, theme }) => {
  const runs = useAnswer("runs", {}, version);
  const a = useAnswer("run", { run: query.a }, version), b = useAnswer("run", { run: query.b }, version);
  const newest = (of) => String(of.data?.evaluations.at(-1)?.round ?? 0);
  const chosen = { ...query, ra: query.ra || newest(a), rb: query.rb || newest(b) };
  const ready = a.data && b.data;
  const change = (more) => go(["compare"], { ...query, ...more });
  return html`<h1>Two runs side by side</h1>
    <${Answered} of=${runs}>${({ runs: all }) => html`<${Answered} of=${a.error ? a : b}>${() => ready && html`
      <p><${Side} name="a" runs=${all} query=${chosen} evaluations=${a.data.evaluations} change=${change} />${" against "}<${Side} name="b" runs=${all} query=${chosen} evaluations=${b.data.evaluations} change=${change} /></p>
      <div class="charts"><${Chart} title="held-out success" range=${[0, 1]} theme=${theme} x="policy version" height=${240}
        series=${[curve(`a: ${query.a}`, a.data.evaluations), curve(`b: ${query.b}`, b.data.evaluations)]} /></div>
      <${Compared} chosen=${chosen} version=${version} />`}<//>`}<//>`;
};

const Compared = ({ chosen, version }) => {
  const of = useAnswer("compare", { a: chosen.a, b: chosen.b, ra: chosen.ra, rb: chosen.rb }, version);
  const cell = (run, side) => html`<a href=${address(["run", run, "t", side.id])}>${percent(side.success)}</a>`;
  return html`<${Answered} of=${of}>${(data) => html`
    <p data-compared>${figure(data.common)} tasks in both (${figure(data.only_first)} only in a, ${figure(data.only_second)} only in b).
      Success ${percent(data.means[0])} and ${percent(data.means[1])}; b is better on ${data.better}, worse on ${data.worse}${data.test ? `; ${data.test.name}: p = ${figure(data.test.p_value, 3)}` : ""}.</p>
    <${Table} name="compared" rows=${data.tasks} columns=${[
      { name: "kind", cell: (r) => r.kind }, { name: "task", cell: (r) => r.task },
      { name: "success a", right: true, cell: (r) => cell(chosen.a, r.first) }, { name: "success b", right: true, cell: (r) => cell(chosen.b, r.second) },
      { name: "difference", right: true, cell: (r) => html`<span class=${r.difference < 0 ? "fault" : r.difference > 0 ? "won" : "dim"}>${figure(r.difference, 3)}</span>` },
      { name: "reward a", right: true, cell: (r) => figure(r.first.reward, 3) }, { name: "reward b", right: true, cell: (r) => figure(r.second.reward, 3) },
      { name: "turns a", right: true, cell: (r) => figure(r.first.turns, 3) }, { name: "turns b", right: true, cell: (r) => figure(r.second.turns, 3) },
    ]} />`}<//>`;
};
