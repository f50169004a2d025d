// The page of `perdure serve`: what is going on, asked for once a second, and a chat. No library, no build.
// What it asks for holds numbers and names only (`/state/live`); texts are those of this chat.

const WINDOW_S = 20;
const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const STALE_S = 3;
const KEY = "perdure-key";
const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

let key = sessionStorage.getItem(KEY);

function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { cache: "no-store", ...options, headers });
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function make(kind, className, text) {
  const element = document.createElement(kind);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function lasting(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// News are for those who cannot see the page change: few, and only what matters.
function tell(news) {
  $("news").textContent = news;
}

// ---------------------------------------------------------------------------------------------- looking

let lookedAt = 0;
let state = "connecting";
let asksForKey = false;

async function look() {
  try {
    const response = await ask("state/live", { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (response.status === 401) {
      askForKey();
    } else if (!response.ok) {
      gone(await errorOf(response));
    } else {
      show(await response.json());
    }
  } catch {
    gone("The server cannot be reached. Trying again.");
  }
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden && !asksForKey) await look();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

function gone(why) {
  showState("gone", "not reachable");
  $("notice").textContent = why;
  $("notice").hidden = false;
}

function show(live) {
  lookedAt = performance.now();
  $("notice").hidden = true;
  const model = live.model.split("/").at(-1); // of a path, the file
  set($("model"), model);
  $("model").title = live.model;
  document.title = `${model} · perdure`;
  const engine = live.stats;
  if (live.is_draining) showState("draining", "ending");
  else if (engine === null) showState("connecting", "starting");
  else showState(engine.state, live.stats_age_s > STALE_S ? `${engine.state}, busy` : engine.state);
  if (engine !== null) showNumbers(live.time - live.stats_age_s, engine);
  showRequests(live);
  showReplicas(live.replicas);
}

function showState(now, words) {
  const badge = $("state");
  set(badge, words);
  badge.dataset.state = now;
  if (now !== state && state !== "connecting") tell(`The engine is ${words}`);
  state = now;
}

// ---------------------------------------------------------------------------------------------- numbers

const heard = []; // [time, tokens generated], the latest last
const rates = [];
const MOST_RATES = 60;

function showNumbers(time, engine) {
  const last = heard.at(-1);
  if (last === undefined || time > last[0] + 0.05) {
    heard.push([time, engine.num_generated_tokens]);
    if (heard.length > 4) heard.shift();
    if (last !== undefined) {
      rates.push(Math.max(0, engine.num_generated_tokens - last[1]) / (time - last[0]));
      if (rates.length > MOST_RATES) rates.shift();
    }
  }
  if (heard.length > 1) {
    const [first, latest] = [heard[0], heard.at(-1)];
    const rate = Math.max(0, latest[1] - first[1]) / (latest[0] - first[0]);
    set($("rate"), rate < 100 && rate > 0 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));
  }
  drawRates();
  set($("running"), engine.num_running.toLocaleString("en"));
  const others = [`${engine.num_waiting.toLocaleString("en")} waiting`];
  if (engine.num_paused) others.push(`${engine.num_paused} paused`);
  set($("waiting"), others.join(", "));
  const used = engine.num_pages - engine.num_free_pages;
  const part = engine.num_pages ? (100 * used) / engine.num_pages : 0;
  set($("occupancy"), `${part > 0 && part < 10 ? part.toFixed(1) : Math.round(part)}%`);
  set($("pages"), `${used.toLocaleString("en")} of ${counted(engine.num_pages, "page")}`);
  const meter = $("pool");
  meter.setAttribute("aria-valuenow", part.toFixed(0));
  meter.toggleAttribute("data-full", part > 95);
  meter.firstElementChild.style.width = `${part}%`;
}

function drawRates() {
  const top = Math.max(1, ...rates) * 1.15;
  const x = (at) => 120 - (120 * (rates.length - 1 - at)) / (MOST_RATES - 1);
  const points = rates.map((rate, at) => `${x(at).toFixed(1)} ${(31 - (30 * rate) / top).toFixed(1)}`);
  const [area, line] = $("rates").children;
  line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  area.setAttribute("d", points.length > 1 ? `M${x(0).toFixed(1)} 32L${points.join("L")}L120 32z` : "");
}

// ---------------------------------------------------------------------------------------------- requests

const rows = new Map();
const own = new Set(); // names of this chat's requests

function showRequests(live) {
  const list = $("requests");
  const held = live.stats !== null && live.stats.state !== "running";
  list.classList.toggle("held", held);
  const begun = (one) => live.time - one.age_s;
  const found = live.requests.toSorted((a, b) => begun(a) - begun(b));
  const seen = new Set();
  for (const one of found) {
    const name = `${one.request_id} ${begun(one).toFixed(2)}`;
    seen.add(name);
    let row = rows.get(name);
    if (row === undefined) {
      row = newRow(one);
      rows.set(name, row);
      list.append(row.element);
    }
    showRow(row, one, held);
  }
  for (const [name, row] of rows) {
    if (!seen.has(name)) {
      row.element.remove();
      rows.delete(name);
    }
  }
  const left = live.num_not_shown ? `, and ${live.num_not_shown.toLocaleString("en")} more` : "";
  set($("requests-title"), `In flight${left}`);
  $("nothing").hidden = rows.size > 0;
  list.hidden = rows.size === 0;
}

function newRow(one) {
  const element = make("li", "request");
  const name = make("span", "name", one.request_id);
  name.title = one.request_id;
  element.classList.toggle("own", own.has(one.request_id));
  element.dataset.request = one.request_id;
  const track = make("span", "track");
  track.setAttribute("aria-hidden", "true");
  const layer = make("span", "layer");
  const now = make("span", "now");
  track.append(layer);
  element.append(name, track, now);
  return { element, layer, now };
}

function showRow(row, one, held) {
  row.element.dataset.state = one.state;
  row.element.classList.toggle("ended", one.ended_s !== null);
  const end = one.ended_s;
  const spans = one.spans.map(([name, ago], at) => [name, ago, at + 1 < one.spans.length ? one.spans[at + 1][1] : end]);
  const shown = spans.filter(([, , until]) => until === null || until < WINDOW_S + 1);
  while (row.layer.children.length > shown.length) row.layer.lastChild.remove();
  shown.forEach(([name, ago, until], at) => {
    const bar = row.layer.children[at] ?? row.layer.appendChild(make("i"));
    const begin = Math.min(ago, WINDOW_S + 2);
    bar.className = `span ${one.state === "paused" && until === null ? "paused" : name}${until === null ? " open" : ""}`;
    bar.style.left = `${100 - (100 * begin) / WINDOW_S}%`;
    bar.style.width = `${(100 * (begin - (until ?? -2))) / WINDOW_S}%`; // one that goes on is cut at the edge
  });
  const doing = end === null ? (held ? `${one.state}, held` : one.state) : (one.reason ?? "ended");
  const where = one.replica === null ? "" : ` · r${one.replica}`;
  const tokens = one.num_output_tokens === null ? "" : `${one.num_prompt_tokens} → ${one.num_output_tokens}`;
  row.now.replaceChildren(make("b", "", doing), ` ${tokens}${where}`);
}

// Between two looks time goes on: all bars move by one property.
function move() {
  if (lookedAt && !document.hidden && !still.matches && rows.size) {
    const passed = Math.min((performance.now() - lookedAt) / 1000, 2);
    $("requests").style.setProperty("--shift", `${(-100 * passed) / WINDOW_S}%`);
  }
  requestAnimationFrame(move);
}

// ---------------------------------------------------------------------------------------------- replicas

const known = new Map(); // index: state

function showReplicas(replicas) {
  const list = $("replicas");
  const most = Math.max(8, ...replicas.map((one) => one.num_requests));
  while (list.children.length > replicas.length) list.lastChild.remove();
  replicas.forEach((one, at) => {
    const item = list.children[at] ?? list.appendChild(newReplica());
    const [name, load, words, bar] = item.children;
    item.dataset.state = one.state;
    item.dataset.index = one.index;
    set(name, `Replica ${one.index}`);
    set(load, one.state === "lost" ? "" : counted(one.num_requests, "request"));
    set(words, `${one.state} for ${lasting(one.for_s)}`);
    bar.firstChild.style.width = `${(100 * one.num_requests) / most}%`;
    const before = known.get(one.index);
    if (before !== undefined && before !== one.state) tell(`Replica ${one.index} is ${one.state}`);
    known.set(one.index, one.state);
  });
}

function newReplica() {
  const item = make("li", "replica");
  const words = make("span", "quiet words");
  const load = make("span", "load");
  load.setAttribute("aria-hidden", "true");
  load.append(make("i"));
  item.append(make("b"), make("span", "quiet"), words, load);
  return item;
}

// ---------------------------------------------------------------------------------------------- the key

function askForKey() {
  asksForKey = true;
  if (key) {
    $("notice").textContent = "The server does not take this key.";
    $("notice").hidden = false;
  }
  key = null;
  sessionStorage.removeItem(KEY);
  showState("connecting", "needs a key");
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEY, key);
  $("key").value = "";
  $("key-form").hidden = true;
  $("notice").hidden = true;
  asksForKey = false;
  look();
  $("message").focus();
});

// ---------------------------------------------------------------------------------------------- chat

let messages = [];
let answering = null; // aborts the answer that comes

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (text && answering === null) answer(text);
});

$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat").requestSubmit();
  }
});

$("stop").addEventListener("click", () => answering?.abort());

$("anew").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  $("log").replaceChildren();
  $("message").focus();
});

function turn(role, text) {
  const log = $("log");
  log.querySelector(".empty")?.remove();
  const element = make("div", `turn ${role}`);
  element.append(make("span", "unseen", role === "user" ? "You: " : "Answer: "), make("div", "said", text));
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

function setBusy(busy) {
  $("log").setAttribute("aria-busy", String(busy)); // a whole answer is read out, not its parts
  $("stop").hidden = !busy;
  $("send").hidden = busy;
}

async function answer(text) {
  const thread = messages;
  thread.push({ role: "user", content: text });
  $("message").value = "";
  turn("user", text);
  const element = turn("assistant", "");
  element.classList.add("streaming");
  answering = new AbortController();
  setBusy(true);
  const name = `page-${Array.from(crypto.getRandomValues(new Uint8Array(3)), (n) => n.toString(16).padStart(2, "0")).join("")}`;
  own.add(name);
  const said = { content: "", reason: null, usage: null, first: null, begun: performance.now() };
  try {
    await stream(thread, name, answering.signal, element, said);
    if (said.content) thread.push({ role: "assistant", content: said.content });
  } catch (error) {
    if (error.name === "AbortError") {
      said.reason = "stopped";
      if (said.content) thread.push({ role: "assistant", content: said.content });
    } else {
      element.classList.add("failed");
      element.querySelector(".said").textContent = error.message;
      thread.pop();
    }
  }
  element.classList.remove("streaming");
  element.append(make("p", "about", about(said)));
  $("log").scrollTop = $("log").scrollHeight;
  answering = null;
  setBusy(false);
}

async function stream(thread, name, signal, element, said) {
  const body = {
    messages: thread,
    request_id: name,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number($("temperature").value),
    max_tokens: Math.max(1, Number($("max-tokens").value) || 512),
  };
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Error(await errorOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)), element, said);
    }
  }
}

function take(event, element, said) {
  if (event.error) throw new Error(event.error.message);
  said.usage = event.usage ?? said.usage;
  const choice = event.choices?.[0];
  if (choice === undefined) return;
  said.reason = choice.finish_reason ?? said.reason;
  const { content, reasoning_content: thought } = choice.delta;
  if (content || thought) said.first ??= performance.now();
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (thought) {
    let place = element.querySelector(".thought");
    if (place === null) element.prepend((place = make("div", "thought")));
    place.append(thought);
  }
  if (content) {
    said.content += content;
    element.querySelector(".said").append(content);
  }
  if (follows) log.scrollTop = log.scrollHeight;
}

function about(said) {
  const parts = [];
  const count = said.usage?.completion_tokens;
  if (said.first !== null) {
    parts.push(`first token after ${((said.first - said.begun) / 1000).toFixed(2)} s`);
    const seconds = (performance.now() - said.first) / 1000;
    const rate = count > 1 && seconds > 0.01 ? `, ${((count - 1) / seconds).toFixed(1)} a second` : "";
    if (count > 0) parts.push(`${counted(count, "token")}${rate}`);
  }
  if (said.reason !== null && said.reason !== "stop") parts.push(said.reason);
  return parts.join(" · ");
}

keepLooking();
requestAnimationFrame(move);
