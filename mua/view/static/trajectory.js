// One trajectory: verdict, conversation, tokens with what is known of each, requests, uses.
import { useEffect, useMemo, useState } from "preact/hooks";
import { around } from "view/list";
import { Answered, Facts, Table, Value, Verdict, address, duration, figure, go, html, moment, useAnswer, useKeys, visible } from "view/ui";

const LABELS = { system: "system", user: "user", tool: "tool", template: "template", sampled: "agent" };
const SHADES = {
  none: "who wrote it", logprobs: "log-probability (engine)", gap: "gap, trainer − engine", advantages: "advantage", weights: "weight", version: "policy version",
};

const Message = ({ message, at }) => {
  const told = message.role === "assistant" && !message.tool_calls && !message.tool_call_errors && !message.truncated;
  return html`<div class=${`message ${message.role}`} data-message=${at}>
    <div class="who">${message.role}${message.name ? ` ${message.name}` : ""}${told ? html` <span class="dim">told the user</span>` : ""}</div>
    ${message.content && html`<div class="text">${typeof message.content === "string" ? visible(message.content) : html`<${Value} value=${message.content} />`}</div>`}
    ${(message.tool_calls ?? []).map((call) => html`<div class="call">${call.function?.name ?? "?"}(<span class="text">${visible(String(call.function?.arguments ?? JSON.stringify(call)))}</span>)</div>`)}
    ${message.tool_call_errors && html`<div class="fault"><${Value} value=${message.tool_call_errors} /></div>`}
  </div>`;
};

// Stretches of equal owner and turn.
const stretches = (columns) => {
  const found = [];
  columns.provenance.forEach((owner, at) => {
    const last = found[found.length - 1];
    if (last && last.owner === owner && last.turn === columns.turn[at]) last.end = at + 1;
    else found.push({ owner, turn: columns.turn[at], start: at, end: at + 1 });
  });
  return found;
};

// How strongly a token is shaded, from 0 to 1, and its color.
const shading = (columns, by) => {
  const values = columns[by];
  if (!values) return () => null;
  const known = values.filter((v) => v !== null);
  const most = Math.max(...known.slice(0, 100000).map(Math.abs), 1e-12);
  const least = by === "version" ? Math.min(...known) : 0;
  return (at) => {
    const value = values[at];
    if (value === null) return null;
    const strength = by === "version" ? (most === least ? 0.5 : (value - least) / (most - least)) : Math.abs(value) / most;
    const color = by === "advantages" || by === "gap" ? (value < 0 ? "239,68,68" : "16,185,129") : by === "logprobs" ? "239,68,68" : "59,130,246";
    return { background: `rgba(${color},${(0.08 + 0.6 * strength).toFixed(3)})` };
  };
};

const Stretch = ({ stretch, columns, provenances, shade, chosen }) => {
  const kind = provenances[stretch.owner];
  const spans = [];
  for (let at = stretch.start; at < stretch.end; at += 1) {
    spans.push(html`<span class=${at === chosen ? "token chosen" : "token"} data-at=${at} style=${shade(at)}>${visible(columns.texts[at]) || "·"}</span>`);
  }
  return html`<div class=${`stretch ${kind}`}><span class="who">${stretch.turn} ${LABELS[kind]}</span><div class="tokens">${spans}</div></div>`;
};

const Token = ({ data, at, close }) => {
  const c = data.columns;
  const of = (name) => c[name]?.[at] ?? null;
  const sampled = data.provenances[c.provenance[at]] === "sampled";
  const trained = of("weights") !== null;
  const why = c.old_logprobs ? null : data.step === null ? "no step trained on it" : "not recorded: this step took it from its own loss (docs/replay.md)";
  return html`<aside class="token-facts" data-token=${at} role="dialog" aria-label="token">
    <button class="close" onClick=${close} title="Escape">×</button>
    <h3>token ${at} <code>${visible(c.texts[at]) || "·"}</code></h3>
    <${Facts} of=${[
      ["id", c.ids[at]],
      ["who wrote it", `${data.provenances[c.provenance[at]]}${sampled ? " (the policy: carries loss)" : ""}`],
      ["turn", c.turn[at]],
      ["policy version", of("version")],
      ["log-probability, engine", of("logprobs")],
      ["log-probability, trainer", of("old_logprobs") ?? (sampled ? why : null)],
      ["gap, trainer − engine", of("gap")],
      ["log-probability, reference", of("reference_logprobs")],
      ["log-probability, teacher", of("teacher_logprobs")],
      ["trained on", trained ? `yes, by step ${data.step}` : sampled ? "no" : "no: context"],
      ["advantage", of("advantages")], ["weight in the loss", of("weights")],
      ["value", of("values")], ["return", of("returns")],
    ].filter(([, value]) => value !== null && value !== undefined)} />
    <p class="dim">← → token, Escape closes</p>
  </aside>`;
};

const Tokens = ({ run, id, query, segments, uses, version }) => {
  const segment = query.segment ?? "0";
  const of = useAnswer("tokens", { run, id, segment, use: query.use }, version);
  const [by, setBy] = useState("none");
  const chosen = query.token === undefined ? null : Number(query.token);
  const choose = (at) => go(["run", run, "t", id], { ...query, token: at ?? "" });
  const data = of.data;
  const parts = useMemo(() => (data ? stretches(data.columns) : []), [data]);
  const shade = useMemo(() => (data ? shading(data.columns, by) : () => null), [data, by]);
  const count = data?.columns.ids.length ?? 0;
  const move = (step) => {
    if (chosen === null) return false;
    if (chosen + step >= 0 && chosen + step < count) choose(chosen + step);
    return true;
  };
  useKeys({ ArrowLeft: () => move(-1), ArrowRight: () => move(1), Escape: () => (chosen === null ? false : choose(null)) }, 2);
  useEffect(() => {
    if (chosen !== null && data) document.querySelector(".token.chosen")?.scrollIntoView({ block: "nearest" });
  }, [chosen, data === null]);
  const clicked = (event) => {
    const at = event.target.closest("[data-at]")?.dataset.at;
    if (at !== undefined) choose(Number(at));
  };
  const steps = [...new Set(uses.filter((u) => u.kept && !u.epoch && u.segment === Number(segment)).map((u) => u.step))];
  return html`
    <h2>Tokens <select aria-label="shade by" name="shade" value=${by} onChange=${(e) => setBy(e.target.value)}>
        ${Object.entries(SHADES).map(([key, text]) => html`<option value=${key}>shade: ${text}</option>`)}</select>
      ${segments.length > 1 && html` <select aria-label="segment" value=${segment} onChange=${(e) => go(["run", run, "t", id], { segment: e.target.value })}>
        ${segments.map((s) => html`<option value=${s.number}>segment ${s.number}, ${s.tokens} tokens</option>`)}</select>`}
      ${steps.length > 1 && html` <select aria-label="step" value=${query.use ?? steps[0]} onChange=${(e) => go(["run", run, "t", id], { ...query, use: e.target.value })}>
        ${steps.map((s) => html`<option value=${s}>as step ${s} read it</option>`)}</select>`}</h2>
    <${Answered} of=${of}>${(answer) => html`
      ${answer.tokenizer && html`<p class="error">${answer.tokenizer}</p>`}
      <p class="dim">Underlined: sampled by the policy, carries loss. Everything else is context. A click shows a token.</p>
      <div class=${`segment ${by}`} onClick=${clicked}>${parts.map((stretch) => html`
        <${Stretch} key=${stretch.start} stretch=${stretch} columns=${answer.columns} provenances=${answer.provenances} shade=${shade}
          chosen=${chosen !== null && chosen >= stretch.start && chosen < stretch.end ? chosen : null} />`)}</div>
      ${chosen !== null && chosen < count && html`<${Token} data=${answer} at=${chosen} close=${() => choose(null)} />`}`}<//>`;
};

const Requests = ({ requests }) => html`
  <${Table} name="requests" rows=${requests} columns=${[
    { name: "role", cell: (r) => r.role }, { name: "number", right: true, cell: (r) => r.number }, { name: "turn", right: true, cell: (r) => figure(r.turn) },
    { name: "endpoint", cell: (r) => r.endpoint ?? "–" }, { name: "version", right: true, cell: (r) => figure(r.version) },
    { name: "prompt", right: true, cell: (r) => figure(r.prompt_tokens) }, { name: "cached", right: true, cell: (r) => figure(r.cached_tokens) },
    { name: "new", right: true, cell: (r) => figure(r.completion_tokens) }, { name: "time", right: true, cell: (r) => duration(r.seconds) },
    { name: "error", cell: (r) => html`<span class="fault">${r.error ?? ""}</span>` },
    { name: "what was asked and answered", cell: (r) => (r.messages.length || r.reply ? html`<details><summary>${r.messages.length} messages</summary>
      ${r.messages.map((m, at) => html`<${Message} message=${m.role ? m : { role: "?", content: m }} at=${at} />`)}
      <div class="message assistant"><div class="who">reply</div><${Value} value=${r.reply} /></div></details>` : html`<span class="dim">tokens of the segment</span>`) },
  ]} />`;

export const Trajectory = ({ run, id, query, version }) => {
  const of = useAnswer("trajectory", { run, id }, version);
  const here = around.run === run ? around.ids.indexOf(id) : -1;
  const beside = (by) => here >= 0 && around.ids[here + by] && go(["run", run, "t", around.ids[here + by]]);
  useKeys({
    "[": () => beside(-1), "]": () => beside(1),
    u: () => go(["run", run, "trajectories"], around.run === run ? around.query : {}),
  });
  return html`
    <h1><a href=${address(["run", run])}>${run}</a> · <a href=${address(["run", run, "trajectories"], around.run === run ? around.query : {})}>trajectories</a> · ${id}</h1>
    <${Answered} of=${of}>${(t) => html`
      <div class="beside">
        <section><h2>Episode</h2><${Facts} of=${[
          ["verdict", html`<span><${Verdict} row=${t} /> reward ${figure(t.reward, 6)}</span>`], ["outcome", t.outcome],
          ["task", t.task_id], ["domain, kind", `${t.domain}, ${t.kind}`], ["split", t.split], ["step", t.round ? `evaluation ${t.round}` : t.step],
          ["turns", t.turns], ["reward by turn", t.turn_rewards.map((r) => figure(r, 4)).join("  ")],
          ["tokens", `${figure(t.tokens)}, ${figure(t.sampled_tokens)} of them sampled`],
          ["policy version", t.version_low === t.version_high ? t.version_low : `${t.version_low} to ${t.version_high}`],
          ["attempts", t.attempts], ["error", t.error], ["time", duration(t.started_at ? t.ended_at - t.started_at : null)],
          ["ended (UTC)", moment(t.ended_at)], ["sampler", t.sampler], ["sampling", t.sampling],
        ].filter(([, v]) => v !== null && v !== undefined)} /></section>
        <section><h2>Verdict</h2>
          <p class="dim">What the environment's evaluation found; differences are to the gold end.</p>
          <div data-verdict><${Facts} of=${[...Object.entries(t.details), ...t.scores.map((s) => [`score: ${s.scorer}`, { value: s.value, ...(s.details ?? {}) }])]} /></div>
          <h2>What the user was told</h2>
          <ol class="values">${t.told_user.map((text) => html`<li><${Value} value=${text} /></li>`)}</ol></section>
        <section><h2>Group ${t.ordinal}</h2>
          <${Table} name="siblings" rows=${t.group} onOpen=${(r) => go(["run", run, "t", r.id])} columns=${[
            { name: "sample", right: true, cell: (r) => (r.id === t.id ? html`<b>${r.sample}</b>` : html`<a href=${address(["run", run, "t", r.id])}>${r.sample}</a>`) },
            { name: "attempt", right: true, cell: (r) => r.attempt }, { name: "", cell: (r) => html`<${Verdict} row=${r} />` },
            { name: "reward", right: true, cell: (r) => figure(r.reward, 4) }, { name: "outcome", cell: (r) => r.outcome },
          ]} />
          <h2>Trained on by</h2>
          <${Table} name="uses" rows=${t.uses} onOpen=${(u) => go(["run", u.run_id, "step", u.step])} columns=${[
            { name: "step", right: true, cell: (u) => u.step }, { name: "part", right: true, cell: (u) => (u.lost ? html`${u.part} <span class="mark lost">lost</span>` : u.part) },
            { name: "epoch", right: true, cell: (u) => u.epoch }, { name: "minibatch", right: true, cell: (u) => u.minibatch },
            { name: "segment", right: true, cell: (u) => u.segment }, { name: "tokens", right: true, cell: (u) => figure(u.tokens) },
          ]} /></section>
      </div>
      <h2>Conversation</h2>
      ${t.messages === null ? html`<p class="dim">pruned</p>` : html`<div class="conversation">${t.messages.map((m, at) => html`<${Message} message=${m} at=${at} />`)}</div>`}
      ${t.segment_list.length > 0 && html`<${Tokens} run=${run} id=${id} query=${query} segments=${t.segment_list} uses=${t.uses} version=${version} />`}
      ${t.tool_calls.length > 0 && html`<h2>Tool calls</h2><${Table} name="tool_calls" rows=${t.tool_calls} columns=${[
        { name: "turn", right: true, cell: (c) => c.turn }, { name: "tool", cell: (c) => c.name }, { name: "by", cell: (c) => (c.by_user ? "user" : "policy") },
        { name: "arguments", cell: (c) => html`<span class="text">${visible(c.arguments ?? "")}</span>` },
        { name: "result", cell: (c) => html`<${Value} value=${c.result} />` },
        { name: "error", cell: (c) => html`<span class="fault">${c.error ?? ""}</span>` },
        { name: "reward", right: true, cell: (c) => figure(c.reward) }, { name: "time", right: true, cell: (c) => duration(c.seconds) },
      ]} />`}
      ${t.requests.length > 0 && html`<h2>Requests</h2><${Requests} requests=${t.requests} />`}
      <details><summary>Metrics</summary><${Facts} of=${Object.entries(t.metrics).sort()} /></details>`}<//>`;
};
