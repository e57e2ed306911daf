// Trajectories under filters, a page at a time. Filters are in the address: a link shows the same list.
import { useEffect, useRef, useState } from "preact/hooks";
import { Answered, COUNTED, Table, Verdict, address, counted, figure, go, html, moment, useAnswer, useKeys } from "view/ui";

const PAGE = 50;
const ORDERS = { newest: "newest first", oldest: "oldest first", reward: "highest reward", tokens: "most tokens", turns: "most turns", seconds: "longest time", gap: "largest gap" };

// What the list before a trajectory was, for the next and the one before.
export const around = { run: null, query: {}, ids: [] };

const Choice = ({ name, value, options, onChange, all }) => html`
  <select name=${name} aria-label=${name} value=${value ?? ""} onChange=${(e) => onChange({ [name]: e.target.value })}>
    <option value="">${all}</option>${options.map(([key, text]) => html`<option value=${key}>${text ?? key}</option>`)}
  </select>`;

const same = (values) => [...new Set(values)].filter((value) => value !== "-" && value !== null).map((value) => [value]);

const Filters = ({ run, query, change, search }) => {
  const about = useAnswer("run", { run });
  const data = about.data ?? { kinds: [], outcomes: [], evaluations: [], suspicions: {} };
  const kinds = [...data.kinds.map((k) => k.kind), ...data.evaluations.flatMap((e) => Object.keys(e.kinds))];
  const [words, setWords] = useState(query.text ?? query.said ?? "");
  const [where, setWhere] = useState(query.said ? "said" : "text");
  const submit = (event) => {
    event.preventDefault();
    change({ text: "", said: "", [where]: words });
  };
  return html`<form class="filters" onSubmit=${submit} role="search">
    <input ref=${search} type="search" name="words" placeholder="search ( / )" value=${words} onInput=${(e) => setWords(e.target.value)} />
    <select aria-label="search in" name="where" value=${where} onChange=${(e) => setWhere(e.target.value)}>
      <option value="text">in ids, tasks, errors, tools</option><option value="said">in conversations</option></select>
    <button>search</button>
    <${Choice} name="success" value=${query.success} all="all verdicts" onChange=${change} options=${[["true", "success"], ["false", "failed"]]} />
    <${Choice} name="scored" value=${query.scored} all="scored or not" onChange=${change} options=${[["true", "scored"], ["false", "not scored (faults)"]]} />
    <${Choice} name="kind" value=${query.kind} all="all kinds" onChange=${change} options=${same(kinds)} />
    <${Choice} name="domain" value=${query.domain} all="all domains" onChange=${change} options=${same(data.kinds.map((k) => k.domain))} />
    <${Choice} name="outcome" value=${query.outcome} all="all outcomes" onChange=${change} options=${same(data.outcomes.map((o) => o.outcome))} />
    <${Choice} name="tool_error" value=${query.tool_error} all="tool errors or not" onChange=${change} options=${[["true", "with a tool error"], ["false", "without"]]} />
    <${Choice} name="suspect" value=${query.suspect} all="suspected or not" onChange=${change}
      options=${[["any", "reward hacking suspects"], ...Object.keys(data.suspicions).map((name) => [name, `suspect: ${name}`])]} />
    <${Choice} name="round" value=${query.round} all="training and evaluations" onChange=${change}
      options=${[["0", "training"], ...[...data.evaluations].reverse().map((e) => [String(e.round), `evaluation ${e.round}, version ${e.version ?? "?"}`])]} />
    <label>step <input name="step" type="number" min="0" value=${query.step ?? ""} onChange=${(e) => change({ step: e.target.value })} /></label>
    <${Choice} name="order" value=${query.order} all="newest first" onChange=${change} options=${Object.entries(ORDERS).slice(1)} />
    ${Object.keys(query).length > 0 && html`<button type="button" onClick=${() => { setWords(""); go(["run", run, "trajectories"]); }}>clear</button>`}
    ${query.suspect && html`<p class="dim">${query.suspect === "any" ? "Scored successes that one of these holds for: " : ""}
      ${Object.entries(data.suspicions).filter(([n]) => query.suspect === "any" || n === query.suspect).map(([n, t]) => `${n}: ${t}`).join("; ")}.</p>`}
    ${query.order === "gap" && html`<p class="dim">Gap: the largest difference between the log-probabilities of engine and trainer, where a step recorded the trainer's; the 1,000 largest.</p>`}
  </form>`;
};

export const Trajectories = ({ run, query, version }) => {
  const { offset = "0", ...filters } = query;
  const of = useAnswer("trajectories", { run, limit: PAGE, offset, ...filters }, version);
  const [at, setAt] = useState(0);
  const search = useRef(null);
  const data = of.data ?? { rows: [], total: 0 }, more = data.total === COUNTED + 1;
  useEffect(() => { Object.assign(around, { run, query, ids: data.rows.map((row) => row.id) }); }, [of.data]);
  useEffect(() => setAt(0), [JSON.stringify(query)]);
  const open = (row) => go(["run", run, "t", row.id]);
  const change = (more) => go(["run", run, "trajectories"], { ...filters, ...more });
  const page = (by) => {
    const to = Number(offset) + by * PAGE;
    if (to >= 0 && (to < data.total || (more && by > 0 && data.rows.length === PAGE) || by < 0)) go(["run", run, "trajectories"], { ...filters, offset: to || "" });
  };
  useKeys({
    "/": () => search.current?.focus(), j: () => setAt(Math.min(at + 1, data.rows.length - 1)), k: () => setAt(Math.max(at - 1, 0)),
    Enter: () => data.rows[at] && open(data.rows[at]), n: () => page(1), p: () => page(-1),
    f: () => change({ success: filters.success === "false" ? "" : "false" }),
  });
  const columns = [
    { name: "trajectory", cell: (r) => html`<a href=${address(["run", run, "t", r.id])}>${r.id}</a>` },
    { name: "", cell: (r) => html`<${Verdict} row=${r} />` },
    { name: "reward", right: true, cell: (r) => figure(r.reward, 4) },
    { name: "kind", cell: (r) => r.kind }, { name: "task", cell: (r) => r.task_id }, { name: "outcome", cell: (r) => r.outcome },
    { name: "turns", right: true, cell: (r) => figure(r.turns) },
    { name: "sampled", right: true, cell: (r) => figure(r.sampled_tokens), title: "sampled tokens" },
    { name: "calls", right: true, cell: (r) => (r.tool_errors ? html`<span class="fault">${r.tool_calls} (${r.tool_errors} failed)</span>` : figure(r.tool_calls)) },
    { name: "gap", right: true, cell: (r) => figure(r.gap, 3), title: "largest |trainer − engine| of a trained token's log-probability" },
    { name: "step", right: true, cell: (r) => (r.round ? `eval ${r.round}` : figure(r.step)) },
    { name: "ended (UTC)", cell: (r) => moment(r.ended_at) },
    { name: "suspect", cell: (r) => r.suspect.join(", ") },
  ];
  const last = Number(offset) + data.rows.length;
  return html`
    <h1>Trajectories of <a href=${address(["run", run])}>${run}</a></h1>
    <${Filters} key=${JSON.stringify(filters)} run=${run} query=${filters} change=${change} search=${search} />
    <${Answered} of=${of}>${() => html`
      <p class="dim" data-total=${data.total}>${counted(data.total)} trajectories${data.total ? `, ${Number(offset) + 1} to ${last}` : ""}
        ${data.searched && data.searched.read < data.searched.of ? ` (read ${figure(data.searched.read)} of ${figure(data.searched.of)}, newest first; filter more to search all)` : ""}
        ${data.total > PAGE && html` <button onClick=${() => page(-1)} title="p">‹ before</button> <button onClick=${() => page(1)} title="n">next ›</button>`}</p>
      <div class="wide"><${Table} name="trajectories" columns=${columns} rows=${data.rows} selected=${at} onOpen=${open} /></div>`}<//>`;
};
