// A view of the engine, from its Prometheus metrics.

const INTERVAL = 1000; // milliseconds between two looks
const LENGTH = 120; // looks that a chart shows
const BRIDGED = 10; // looks without a value that the line of a latency passes over
const PREFIX = /^(?:jaxllm|vllm):/;
const SVG = "http://www.w3.org/2000/svg";
const SAMPLE = /^([^\s{]+)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples of Prometheus text by name without prefix: [{labels, value}]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.match(SAMPLE);
    if (!match || !PREFIX.test(match[1])) continue;
    const name = match[1].replace(PREFIX, "");
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map((label) => [label[1], label[2]]));
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** Numbers of one look, summed over engines; shares are their mean. */
export function readNumbers(metrics) {
  const values = (name) => (metrics.get(name) ?? []).map((sample) => sample.value);
  const sum = (name) => values(name).reduce((total, value) => total + value, 0);
  const usage = values("kv_cache_usage_perc");
  const info = metrics.get("cache_config_info") ?? [];
  return {
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    usage: usage.length ? usage.reduce((total, value) => total + value, 0) / usage.length : null,
    blocks: info.reduce((total, { labels }) => total + (Number(labels.num_gpu_blocks) || 0), 0),
    queries: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    prompt: sum("prompt_tokens_total"),
    generated: sum("generation_tokens_total"),
    ttftSum: sum("time_to_first_token_seconds_sum"),
    ttftCount: sum("time_to_first_token_seconds_count"),
    itlSum: sum("inter_token_latency_seconds_sum"),
    itlCount: sum("inter_token_latency_seconds_count"),
    preemptions: sum("num_preemptions_total"),
    finished: sum("request_success_total"),
  };
}

/** What a look shows, and what happened since the one before; null where there is nothing to say. */
export function between(before, now, seconds) {
  const shown = { running: now.running, waiting: now.waiting, usage: now.usage === null ? null : 100 * now.usage };
  const grown = (name) => now[name] - before[name];
  const ratio = (top, bottom, factor) => (grown(bottom) > 0 ? (factor * grown(top)) / grown(bottom) : null);
  // A counter that shrinks is that of an engine that was started anew.
  if (before === null || grown("generated") < 0 || grown("prompt") < 0) {
    return { ...shown, hitRate: null, generated: null, prompt: null, ttft: null, itl: null };
  }
  return {
    ...shown,
    hitRate: ratio("hits", "queries", 100),
    generated: grown("generated") / seconds,
    prompt: grown("prompt") / seconds,
    ttft: ratio("ttftSum", "ttftCount", 1000),
    itl: ratio("itlSum", "itlCount", 1000),
  };
}

const integer = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value >= 100 ? integer(value) : value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, ""));

const CARDS = [
  { title: "Requests", fields: ["running", "waiting"], names: ["running", "waiting"], format: integer, least: 5 },
  { title: "KV blocks in use", fields: ["usage"], format: (v) => short(v) + " %", least: 1 },
  { title: "Tokens/s", fields: ["generated", "prompt"], names: ["out", "in"], format: short, least: 10 },
  { title: "Prefix cache hits", fields: ["hitRate"], format: (v) => short(v) + " %", least: 100, stays: true },
  { title: "Time to first token", fields: ["ttft"], format: (v) => short(v) + " ms", least: 10, stays: true },
  { title: "Inter-token latency", fields: ["itl"], format: (v) => short(v) + " ms", least: 5, stays: true },
];

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** 1, 2 or 5 times a power of ten, at least `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * (1 - 1e-9));
}

/** Stretches of points; where no more than `bridged` are missing, the line goes on. */
function runs(values, bridged) {
  const found = [];
  let last = -Infinity;
  values.forEach((value, i) => {
    if (value === null) return;
    if (i - last > bridged + 1) found.push([]);
    found.at(-1).push([i, value]);
    last = i;
  });
  return found;
}

class Card {
  constructor(options) {
    this.options = options;
    this.card = document.createElement("figure");
    this.card.className = "card";
    const title = document.createElement("h3");
    title.textContent = options.title;
    this.values = document.createElement("p");
    this.values.className = "values";
    this.chart = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
    const scale = document.createElement("p");
    scale.className = "scale";
    this.top = document.createElement("span");
    this.when = document.createElement("span");
    scale.append(this.top, this.when);
    this.card.append(title, this.values, this.chart, scale);
    this.at = null; // which look the pointer is on
    this.chart.addEventListener("pointermove", (event) => {
      const box = this.chart.getBoundingClientRect();
      this.at = Math.min(LENGTH - 1, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * (LENGTH - 1))));
      this.draw();
    });
    this.chart.addEventListener("pointerleave", () => {
      this.at = null;
      this.draw();
    });
  }

  /** Show a history of looks, the newest last. `detail` stands below the value. */
  show(history, detail = "") {
    this.history = history;
    this.detail = detail;
    this.draw();
  }

  draw() {
    if (!this.history) return;
    // `stays`: it is what it was last while nothing runs. `least`: what the axis reaches at least.
    const { fields, names, format, least, stays } = this.options;
    const series = fields.map((field) => {
      const values = this.history.map((look) => look?.[field] ?? null);
      return [...Array(LENGTH - values.length).fill(null), ...values];
    });
    const ceiling = niceCeiling(Math.max(least, ...series.flat().filter((value) => value !== null)));
    const point = ([i, value]) => `${((100 * i) / (LENGTH - 1)).toFixed(2)},${(100 - (96 * value) / ceiling).toFixed(2)}`;

    const drawn = [svg("line", { x1: 0, x2: 100, y1: 100, y2: 100 })];
    series.forEach((values, i) => {
      for (const run of runs(values, stays ? BRIDGED : 0)) {
        // A run of one look is a dot, drawn as a line that is a little longer than nothing.
        const points = run.length > 1 ? run : [run[0], [run[0][0] + 0.4, run[0][1]]];
        const text = points.map(point).join(" ");
        if (i === 0) drawn.push(svg("polygon", { points: `${point([points[0][0], 0])} ${text} ${point([points.at(-1)[0], 0])}` }));
        drawn.push(svg("polyline", { points: text, class: i ? "second" : "first" }));
      }
    });
    if (this.at !== null) {
      const x = (100 * this.at) / (LENGTH - 1);
      drawn.push(svg("line", { x1: x, x2: x, y1: 0, y2: 100, class: "cursor" }));
    }
    this.chart.replaceChildren(...drawn);

    const look = this.at ?? LENGTH - 1;
    const shown = series.map((values) => values[look] ?? (stays && this.at === null ? (values.findLast((value) => value !== null) ?? null) : null));
    const texts = shown.map((value) => (value === null ? "–" : format(value)));
    this.values.replaceChildren(...texts.map((text, i) => this.labelled(text, i, names?.[i] ?? (this.at === null ? this.detail : ""))));
    this.top.textContent = "up to " + format(ceiling);
    const ago = (LENGTH - 1 - look) * (INTERVAL / 1000);
    this.when.textContent = this.at === null ? `${(LENGTH * INTERVAL) / 60000} min` : ago ? `${ago} s ago` : "now";
    const said = texts.map((text, i) => (names ? `${text} ${names[i]}` : text)).join(", ");
    this.chart.setAttribute("aria-label", `${this.options.title}: ${said}`);
  }

  /** A number, and below it what it is, with the colour of its line if there are several. */
  labelled(text, i, label) {
    const pair = document.createElement("span"), number = document.createElement("b"), small = document.createElement("small");
    number.textContent = text;
    small.textContent = label;
    if (this.options.names) {
      const key = document.createElement("span");
      key.className = i ? "key second" : "key";
      small.prepend(key);
    }
    pair.append(number, small);
    return pair;
  }
}

function showTotals(parent, now) {
  const share = now.queries > 0 ? `${((100 * now.hits) / now.queries).toFixed(1)} %` : "–";
  const rows = [
    ["Requests finished", integer(now.finished)],
    ["Prompt tokens", integer(now.prompt)],
    ["From the prefix cache", share],
    ["Generated tokens", integer(now.generated)],
    ["Preemptions", integer(now.preemptions)],
  ];
  parent.replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      return [dt, dd];
    }),
  );
}

/**
 * Look at the engine every second, as long as the page can be seen.
 * `onHealth(state, text)` is told whether it is up.
 */
export function startEngineView({ cards, totals, note, onHealth }) {
  const made = CARDS.map((options) => new Card(options));
  cards.append(...made.map((card) => card.card));
  let history = [], before = null, beforeTime = 0;

  function say(text) {
    note.hidden = !text;
    if (note.textContent !== text) note.textContent = text;
  }

  function take(text, time) {
    const metrics = parseMetrics(text);
    if (!metrics.has("num_requests_running")) {
      say("The engine keeps no statistics.");
      return;
    }
    say("");
    const now = readNumbers(metrics);
    history = [...history, between(before, now, (time - beforeTime) / 1000)].slice(-LENGTH);
    before = now;
    beforeTime = time;
    const used = now.usage === null || !now.blocks ? "" : `${integer(now.usage * now.blocks)} of ${integer(now.blocks)}`;
    for (const card of made) card.show(history, card.options.fields[0] === "usage" ? used : "");
    showTotals(totals, now);
  }

  async function look() {
    if (document.hidden) {
      // Nobody sees it, and what happens meanwhile is not one look's.
      before = null;
      return;
    }
    let health;
    try {
      health = await fetch("health", { cache: "no-store" });
    } catch {
      onHealth("down", "no server");
      before = null;
      return;
    }
    if (!health.ok) {
      onHealth("down", "engine is down");
      before = null;
      return;
    }
    onHealth("up", "ready");
    const response = await fetch("metrics", { cache: "no-store" });
    const time = performance.now();
    if (response.ok) take(await response.text(), time);
    else say("The server shows no metrics.");
  }

  async function loop() {
    const begin = performance.now();
    try {
      await look();
    } catch (error) {
      before = null;
      console.warn("the engine's metrics cannot be read:", error);
    }
    setTimeout(loop, Math.max(100, INTERVAL - (performance.now() - begin)));
  }
  loop();
}
