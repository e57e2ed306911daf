// Which page the address names, the keys that work everywhere, dark and light, and looking again while a run goes on.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ask, inFile } from "view/api";
import { Compare } from "view/compare";
import { Trajectories } from "view/list";
import { Overview, Runs } from "view/overview";
import { Step, Steps } from "view/steps";
import { Trajectory } from "view/trajectory";
import { address, go, html, useAnswer, useKeys } from "view/ui";

const EVERY = 4000;
const KEYS = [
  ["?", "these keys"], ["g", "runs"], ["o", "the run"], ["s", "its steps"], ["l", "its trajectories"], ["j k", "down, up"], ["Enter", "open"],
  ["n p", "next page, page before"], ["/", "search"], ["f", "failed only"], ["[ ]", "the one before, the next"], ["u", "back to the list"],
  ["← →", "token"], ["c", "compare (in the list of runs)"], ["t", "dark, light"], ["Escape", "close"],
];

const place = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  try {
    return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)) };
  } catch {
    return { parts: [], query: {} };
  }
};

// Asks what is cheap, and counts up where something is new.
const useVersion = (run) => {
  const [version, set] = useState(0);
  useEffect(() => {
    if (inFile) return undefined;
    let last = null, stopped = false, timer;
    const look = async () => {
      if (document.visibilityState === "visible") {
        try {
          const now = JSON.stringify(run ? await ask("changes", { run }) : await ask("runs"));
          if (last !== null && now !== last && !stopped) set((v) => v + 1);
          last = now;
        } catch { /* the page's own questions say what is wrong */ }
      }
      if (!stopped) timer = setTimeout(look, EVERY);
    };
    timer = setTimeout(look, 0);
    return () => { stopped = true; clearTimeout(timer); };
  }, [run]);
  return version;
};

const kept = () => { try { return localStorage.getItem("mua-theme"); } catch { return null; } };
const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

const Page = ({ at, version, theme }) => {
  const [what, run, sort, id] = at.parts;
  if (what === "compare") return html`<${Compare} query=${at.query} version=${version} theme=${theme} />`;
  if (what !== "run") return html`<${Runs} version=${version} />`;
  if (sort === "steps") return html`<${Steps} run=${run} version=${version} />`;
  if (sort === "step") return html`<${Step} run=${run} step=${id} version=${version} />`;
  if (sort === "trajectories") return html`<${Trajectories} run=${run} query=${at.query} version=${version} />`;
  if (sort === "t") return html`<${Trajectory} run=${run} id=${id} query=${at.query} version=${version} />`;
  return html`<${Overview} run=${run} version=${version} theme=${theme} />`;
};

const Note = () => {
  const of = useAnswer("runs", {});
  return of.data?.note ? html`<p class="note">${of.data.note}</p>` : null;
};

const App = () => {
  const [at, setAt] = useState(place());
  const [help, setHelp] = useState(false);
  const [theme, setTheme] = useState(kept() ?? system());
  useEffect(() => {
    const moved = () => setAt(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => { document.documentElement.dataset.theme = theme; }, [theme]);
  useEffect(() => {
    const lead = document.getElementById("lead");
    if (lead) lead.hidden = at.parts.length > 0;
  }, [at]);
  const turn = () => {
    const next = theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("mua-theme", next); } catch { /* a file's page may have no storage */ }
    setTheme(next);
  };
  const run = at.parts[0] === "run" ? at.parts[1] : null;
  const version = useVersion(run);
  useKeys({
    "?": () => setHelp(!help), g: () => go([]), t: turn, Escape: () => setHelp(false),
    o: () => run && go(["run", run]), s: () => run && go(["run", run, "steps"]), l: () => run && go(["run", run, "trajectories"]),
  }, 0);
  return html`
    <header><a class="home" href="#/">mua view</a>
      ${run && html`<nav><a href=${address(["run", run])}>run</a> <a href=${address(["run", run, "steps"])}>steps</a>
        <a href=${address(["run", run, "trajectories"])}>trajectories</a></nav>`}
      <span class="space"></span>
      <button onClick=${() => setHelp(!help)} title="?">keys</button><button name="theme" onClick=${turn} title="t">${theme === "dark" ? "light" : "dark"}</button></header>
    ${inFile && html`<${Note} />`}
    ${help && html`<aside class="help" role="dialog" aria-label="keys"><table>${KEYS.map(([key, text]) => html`<tr><th>${key}</th><td>${text}</td></tr>`)}</table></aside>`}
    <main><${Page} at=${at} version=${version} theme=${theme} /></main>`;
};

render(html`<${App} />`, document.getElementById("app"));
