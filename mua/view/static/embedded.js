// The answers of a page in a file: packed beside it, unpacked when they are asked for.
const found = (name) => document.querySelector(`script[data-name="${CSS.escape(name)}"]`);

const unpacked = async (name) => {
  const packed = Uint8Array.from(atob(found(name).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

const yes = (value) => ["true", "1", "yes"].includes(value);
const orders = {
  newest: (row) => -row.ended_at,
  oldest: (row) => row.ended_at,
  reward: (row) => -row.reward,
  tokens: (row) => -row.tokens,
  turns: (row) => -row.turns,
  seconds: (row) => -row.seconds,
  gap: (row) => -(row.gap ?? -1),
};

// As mua.store.queries.TrajectoryFilter and mua.view.trajectory_lists, over the rows that the file has.
const holds = {
  round: (row, value) => row.round === Number(value),
  ordinal: (row, value) => row.ordinal === Number(value),
  step: (row, value) => row.steps.includes(Number(value)),
  domain: (row, value) => row.domain === value,
  task: (row, value) => row.task_id === value,
  outcome: (row, value) => row.outcome === value,
  kind: (row, value) => row.kind === value,
  success: (row, value) => row.success === yes(value),
  scored: (row, value) => row.scored === yes(value),
  kept: (row, value) => (row.pruned !== "arrays") === yes(value),
  tool_error: (row, value) => row.tool_errors > 0 === yes(value),
  suspect: (row, value) => (value === "any" ? row.suspect.length > 0 : row.suspect.includes(value)),
  text: (row, value) =>
    [row.id, row.task_id, row.error ?? "", ...row.tools].some((text) => text.toLowerCase().includes(value.toLowerCase())),
};

const page = async (run, given) => {
  let rows = run.rows;
  for (const [name, value] of Object.entries(given)) if (holds[name]) rows = rows.filter((row) => holds[name](row, value));
  let searched = null;
  if (given.said) {
    const kept = [];
    for (const row of rows) {
      const { trajectory } = await unpacked(`t/${row.key}`);
      if (JSON.stringify(trajectory.messages).toLowerCase().includes(JSON.stringify(given.said).slice(1, -1).toLowerCase())) kept.push(row);
    }
    searched = { read: rows.length, of: rows.length };
    rows = kept;
  }
  if (given.order === "gap") rows = rows.filter((row) => row.gap !== null);
  const key = orders[given.order || "newest"];
  rows = [...rows].sort((a, b) => key(a) - key(b) || (a.id < b.id ? -1 : 1) * (["oldest", "gap"].includes(given.order) ? 1 : -1));
  const offset = Number(given.offset || 0);
  return { total: rows.length, rows: rows.slice(offset, offset + Number(given.limit || 50)), searched };
};

const missing = (what) => { throw new Error(`${what}: not in this file; mua view shows all of the run`); };

class Embedded {
  async answer(path, given) {
    this.index ??= unpacked("index");
    const index = await this.index;
    if (path === "runs") return { runs: index.runs, note: index.note };
    if (path === "compare") {
      return index.compared[[given.a, given.b, given.ra, given.rb].join(" ")] ?? missing("this comparison");
    }
    const run = index.of_run[given.run] ?? missing(`run ${given.run}`);
    if (path === "run" || path === "changes" || path === "steps") return run[path];
    if (path === "curves") return { curves: Object.fromEntries(given.names.split(",").map((name) => [name, run.curves[name] ?? [[], []]])) };
    if (path === "step") return run.step[given.step] ?? missing(`step ${given.step}`);
    if (path === "trajectories") return page(run, given);
    const row = run.rows.find((one) => one.id === given.id) ?? missing(`trajectory ${given.id}`);
    const whole = await unpacked(`t/${row.key}`);
    if (path === "trajectory") return whole.trajectory;
    return whole.tokens[Number(given.segment)] ?? missing("the tokens of this segment");
  }
}

export const embedded = found("index") ? new Embedded() : null;
