// What every page is made of: markup, formats of figures, small parts. Text reaches the page as text nodes alone.
import { h, Fragment } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import { ask } from "view/api";

export const html = htm.bind(h);
export { Fragment };

// As mua.store.queries.COUNTED: a count of one more says that there are more.
export const COUNTED = 1000;
export const counted = (value) => (value === COUNTED + 1 ? `more than ${figure(COUNTED)}` : figure(value));

export const figure = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
};
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
export const moment = (seconds) =>
  seconds ? new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ") : "–";
export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${figure(seconds, 3)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
};

// The picture of a control character stands for it, so that nothing is invisible.
export const visible = (text) =>
  text
    .replace(/[\x00-\x08\x0b-\x1f\x7f]/g, (c) => String.fromCharCode(c === "\x7f" ? 0x2421 : 0x2400 + c.charCodeAt(0)))
    // What turns the direction of writing or has no width is spelt out.
    .replace(/[\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16)}`);

export const address = (parts, query = {}) => {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const path = parts.map(encodeURIComponent).join("/");
  return `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
};
export const go = (parts, query) => { location.hash = address(parts, query); };

// The answer to a question, asked again when the question or `version` changes; the last one stays meanwhile.
export const useAnswer = (path, parameters, version = 0) => {
  const [state, set] = useState({ data: null, error: null, asked: null });
  const question = `${path}?${new URLSearchParams(parameters)}`;
  useEffect(() => {
    let current = true;
    ask(path, parameters).then(
      (data) => current && set({ data, error: null, asked: question }),
      (error) => current && set({ data: null, error, asked: question }),
    );
    return () => { current = false; };
  }, [question, version]);
  const same = state.asked !== null && state.asked.split("?")[0] === path;
  return { data: same ? state.data : null, error: same ? state.error : null, fresh: state.asked === question };
};

export const Answered = ({ of, children }) => {
  if (of.error) return html`<p class="error" role="alert">${of.error.message}</p>`;
  if (of.data === null) return html`<p class="dim">loading …</p>`;
  const damaged = of.data.damaged && html`<p class="error" role="alert">damaged, and shown as nothing (mua store verify): ${of.data.damaged.join(", ")}</p>`;
  return html`${damaged}${children(of.data)}`;
};

export const Table = ({ columns, rows, onOpen, selected, name }) => html`
  <table class="rows" data-table=${name}>
    <thead><tr>${columns.map((c) => html`<th class=${c.right ? "right" : ""} title=${c.title}>${c.name}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`
      <tr key=${row.key ?? at} class=${`${onOpen ? "opens" : ""} ${selected === at ? "selected" : ""}`}
          onClick=${onOpen && ((event) => event.target.closest("a") || onOpen(row, at))}>
        ${columns.map((c) => html`<td class=${c.right ? "right" : ""}>${c.cell(row)}</td>`)}
      </tr>`)}
    </tbody>
  </table>`;

export const Verdict = ({ row }) => {
  if (!row.scored) return html`<span class="mark fault" title="the infrastructure's fault: not scored">not scored</span>`;
  return row.success ? html`<span class="mark won">success</span>` : html`<span class="mark lost">failed</span>`;
};

export const Bar = ({ share }) => html`<span class="bar"><span style=${{ width: `${100 * (share ?? 0)}%` }}></span></span>`;

// Any value that somebody else wrote, as text.
export const Value = ({ value }) => {
  if (value === null || value === undefined) return html`<span class="dim">–</span>`;
  if (typeof value === "string") return html`<span class="text">${visible(value)}</span>`;
  if (typeof value !== "object") return figure(value, 6);
  if (Array.isArray(value)) {
    if (!value.length) return html`<span class="dim">none</span>`;
    return html`<ul class="values">${value.map((inner) => html`<li><${Value} value=${inner} /></li>`)}</ul>`;
  }
  const entries = Object.entries(value);
  if (!entries.length) return html`<span class="dim">none</span>`;
  return html`<${Facts} of=${entries} />`;
};

export const Facts = ({ of }) => html`
  <table class="facts"><tbody>${of.map(([name, value]) => html`
    <tr><th>${name}</th><td>${value?.type !== undefined && value?.props ? value : html`<${Value} value=${value} />`}</td></tr>`)}
  </tbody></table>`;

// Keys by name while the part is on the page; not while somebody writes into a field. Of several parts the one of the
// highest level has a key, unless it answers false. What a part drew last is what its keys do.
const layers = [];
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  for (const layer of [...layers].sort((a, b) => b.level - a.level)) {
    const pressed = layer.keys.current[event.key];
    if (pressed && pressed(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});

export const useKeys = (keys, level = 1) => {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    const layer = { keys: latest, level };
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
};
