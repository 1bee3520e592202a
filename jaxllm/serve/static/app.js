// The page: a chat with the model, and a view of the engine. No framework, no build step.

import { openStream } from "./stream.js";
import { renderMarkdown } from "./markdown.js";
import { startEngineView } from "./engine.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const prompt = $("prompt");
const settings = $("sampling");

let messages = []; // what the model is told: {role, content}
let running = null; // AbortController of the answer that is being written
let apiKey = "";
let model = null; // what the server calls it; null until it said so

// --- Settings -------------------------------------------------------------------------------------------------------------

const STORED = ["system", "temperature", "top_p", "max_tokens", "seed"];

function stored(name, value) {
  // Storage may be forbidden; the page works without.
  try {
    if (value === undefined) return localStorage.getItem("jaxllm." + name);
    if (value === null) localStorage.removeItem("jaxllm." + name);
    else localStorage.setItem("jaxllm." + name, value);
  } catch (error) {
    console.warn("settings are not kept:", error);
  }
  return null;
}

function showRange(name) {
  const field = $(name), range = $(name + "-range");
  // An empty field is the server's choice, which a slider cannot show but by its most common value.
  range.value = field.value === "" ? 1 : field.value;
  range.classList.toggle("unset", field.value === "");
}

for (const name of STORED) {
  $(name).value = stored(name) ?? "";
  $(name).addEventListener("input", () => stored(name, $(name).value || null));
}
for (const name of ["temperature", "top_p"]) {
  showRange(name);
  $(name).addEventListener("input", () => showRange(name));
  $(name + "-range").addEventListener("input", (event) => {
    $(name).value = event.target.value;
    $(name).dispatchEvent(new Event("input"));
  });
}
$("api_key").addEventListener("change", () => {
  apiKey = $("api_key").value;
  loadModels();
});
$("reset").addEventListener("click", () => {
  for (const name of STORED) {
    $(name).value = "";
    $(name).dispatchEvent(new Event("input"));
  }
});
settings.addEventListener("submit", (event) => event.preventDefault());

function headers() {
  return { "Content-Type": "application/json", ...(apiKey && { Authorization: "Bearer " + apiKey }) };
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    ...(model !== null && { model }),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = $(name).valueAsNumber;
  }
  return body;
}

// --- Header ---------------------------------------------------------------------------------------------------------------

const THEMES = { "": ["◐", "as the system has them"], light: ["☀\uFE0E", "light"], dark: ["☾", "dark"] };

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const [sign, name] = THEMES[theme];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", "Colours: " + name);
  $("theme").title = "Colours: " + name;
}

let theme = stored("theme") ?? "";
if (!(theme in THEMES)) theme = "";
showTheme(theme);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  stored("theme", theme || null);
  showTheme(theme);
});

function showHealth(state, text) {
  const health = $("health");
  // Screen readers speak a status whenever it is written.
  if (health.dataset.state === state && health.lastElementChild.textContent === text) return;
  health.dataset.state = state;
  health.title = text;
  health.lastElementChild.textContent = text;
}

function showModels(names, placeholder) {
  $("model").replaceChildren(...(names.length ? names : [placeholder]).map((name) => new Option(name)));
  $("model").disabled = names.length < 2;
  model = names[0] ?? null;
  document.title = model === null ? "jaxllm" : `${model} · jaxllm`;
}
$("model").addEventListener("change", () => {
  model = $("model").value;
  document.title = `${model} · jaxllm`;
});

async function loadModels() {
  let response;
  try {
    response = await fetch("v1/models", { headers: headers() });
  } catch {
    showModels([], "no server");
    return;
  }
  if (response.ok) {
    showModels((await response.json()).data.map((one) => one.id), "no model");
    return;
  }
  showModels([], response.status === 401 ? "needs an API key" : `error ${response.status}`);
  if (response.status === 401) {
    goTo("settings");
    $("api_key").focus();
  }
}

function goTo(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.goto === view));
  }
}
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => goTo(button.dataset.goto));

// --- Chat -----------------------------------------------------------------------------------------------------------------

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function atBottom() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function addTurn(role, text) {
  $("empty").hidden = true;
  const turn = element("article", "turn " + role, text);
  turn.setAttribute("aria-label", role === "user" ? "You" : "Model");
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
}

/** One answer on the page, written as its chunks come, at most once a frame. */
class Answer {
  constructor() {
    this.turn = addTurn("assistant");
    this.turn.classList.add("busy");
    this.answer = element("div", "answer");
    this.meta = element("p", "meta");
    this.turn.append(this.answer, this.meta);
    this.text = this.reasoning = "";
    this.sent = performance.now();
    this.first = this.last = null; // times of chunks with output
    this.usage = null;
    this.chunks = 0;
    this.finish = null;
    this.frame = 0;
  }

  /** Take a chunk of the stream. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content;
    if (delta.content || reasoning || choice.finish_reason) {
      this.last = performance.now();
      this.first ??= this.last;
      this.chunks += 1;
    }
    this.text += delta.content ?? "";
    this.reasoning += reasoning ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  /** Tokens, as the server counts them, or one a chunk until it does. */
  get tokens() {
    return this.usage?.completion_tokens ?? this.chunks;
  }

  show() {
    this.frame = 0;
    const follow = atBottom();
    if (this.reasoning) {
      this.thinking ??= this.addThinking();
      this.thinking.lastElementChild.textContent = this.reasoning;
    }
    renderMarkdown(this.answer, this.text);
    this.meta.replaceChildren(...this.figures().map((text) => element("span", "", text)));
    if (follow) log.scrollTop = log.scrollHeight;
  }

  addThinking() {
    const details = element("details", "thinking");
    details.open = true;
    details.append(element("summary", "", "Thinking"), element("pre"));
    this.turn.prepend(details);
    return details;
  }

  figures() {
    if (this.first === null) return [];
    const found = [];
    if (this.usage) found.push(`${this.usage.prompt_tokens} prompt tokens`);
    found.push(`${this.tokens} tokens`);
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens > 1 && seconds > 0) found.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    found.push(`first after ${formatSeconds((this.first - this.sent) / 1000)}`);
    return found;
  }

  /** The end: by itself, by the user, or by an error. */
  close(note, error) {
    cancelAnimationFrame(this.frame);
    this.show();
    this.turn.classList.remove("busy");
    if (this.thinking && this.text) this.thinking.open = false;
    if (note) this.meta.append(element("span", "", note));
    if (error) {
      const box = element("p", "error", error);
      box.setAttribute("role", "alert");
      this.turn.append(box);
    }
    if (this.text) this.meta.append(copyButton(() => this.text));
    this.meta.append(retryButton(this.turn));
    if (atBottom() || error) log.scrollTop = log.scrollHeight;
  }
}

function formatSeconds(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

function copyButton(text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  // The clipboard is there on https and localhost only.
  button.hidden = !navigator.clipboard;
  return button;
}

function retryButton(turn) {
  const button = element("button", "quiet retry", "Retry");
  button.type = "button";
  button.addEventListener("click", () => {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    turn.remove();
    answer();
  });
  return button;
}

const FINISHES = { length: "reached the most tokens", stop: "", tool_calls: "asks for a tool", abort: "aborted by the server" };

async function answer() {
  for (const button of log.querySelectorAll(".retry")) button.remove(); // only the last answer can be tried again
  const controller = new AbortController();
  const conversation = messages; // another may begin while this one is answered
  setRunning(controller);
  const shown = new Answer();
  let note = "", error = "";
  try {
    const body = JSON.stringify(requestBody());
    for await (const chunk of openStream("v1/chat/completions", { headers: headers(), body, signal: controller.signal })) {
      shown.take(chunk);
    }
    note = FINISHES[shown.finish] ?? "";
    if (shown.finish === null) error = "The answer ended early.";
  } catch (failure) {
    if (controller.signal.aborted) note = "stopped";
    else error = failure.message;
  }
  if (shown.text) conversation.push({ role: "assistant", content: shown.text });
  shown.close(note, error);
  if (running !== controller) return;
  setRunning(null);
  $("announce").textContent = error ? "" : `Answer ${note || "complete"}: ${shown.text}`;
}

function send(text) {
  text = text.trim();
  if (!text || running) return;
  if (!settings.reportValidity()) {
    goTo("settings");
    settings.reportValidity();
    return;
  }
  goTo("chat");
  // A question that got no answer is not asked again.
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  prompt.value = "";
  answer();
}

function newChat() {
  running?.abort();
  setRunning(null);
  messages = [];
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  $("empty").hidden = false;
  $("announce").textContent = "";
  prompt.focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  // While an input method composes a word, Enter is its own.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(prompt.value);
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("new-chat").addEventListener("click", newChat);
for (const button of document.querySelectorAll(".examples button")) button.addEventListener("click", () => send(button.textContent));

setRunning(null);
loadModels();
startEngineView({
  cards: $("cards"),
  totals: $("totals"),
  note: $("engine-note"),
  onHealth(state, text) {
    const was = $("health").dataset.state;
    showHealth(state, text);
    // A server that was started after the page.
    if (state === "up" && was === "down" && model === null) loadModels();
  },
});
