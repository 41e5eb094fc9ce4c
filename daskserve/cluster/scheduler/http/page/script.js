// The page of daskserve. All text of users gets into the document as text nodes and attribute values, never as
// markup; the Content-Security-Policy of the page (require-trusted-types-for) refuses anything else.
"use strict";

// ---- Elements. h() describes one, and sync() makes the document so; an element that stays keeps its focus.

const SVG = new Set(["svg", "g", "path", "rect", "circle", "text", "title", "defs", "marker"]);
const PROPERTIES = new Set(["value", "checked", "disabled", "selected"]);

function h(tag, props, ...kids) {
  return { tag, props: props || {}, kids: kids.flat(Infinity).filter((each) => each != null && each !== false && each !== "") };
}

function create(kid) {
  if (kid.tag === undefined) return document.createTextNode("");
  // The title of a document is HTML; that of a drawing is not used outside of drawings.
  const node = SVG.has(kid.tag) || kid.props.svg ? document.createElementNS("http://www.w3.org/2000/svg", kid.tag) : document.createElement(kid.tag);
  node.$props = {};
  return node;
}

function fits(node, kid) {
  if (kid.tag === undefined) return node.nodeType === 3;
  return node.nodeType === 1 && node.localName === kid.tag && node.$key === kid.props.key;
}

function update(node, kid) {
  if (kid.tag === undefined) {
    const text = String(kid);
    if (node.data !== text) node.data = text;
    return;
  }
  node.$key = kid.props.key;
  const before = node.$props, now = kid.props;
  for (const name in before) if (!(name in now)) set(node, name, null);
  for (const name in now) if (before[name] !== now[name] || PROPERTIES.has(name)) set(node, name, now[name]);
  node.$props = now;
  if (!now.own && !(now.once && node.firstChild)) sync(node, kid.kids);
}

function set(node, name, value) {
  if (name === "key" || name === "svg" || name === "own" || name === "once") return;
  if (name.startsWith("on")) node[name] = value;
  else if (name === "style") for (const each in value || {}) node.style.setProperty(each, value[each]);
  else if (PROPERTIES.has(name)) { if (document.activeElement !== node || name === "disabled") node[name] = value ?? ""; }
  else if (value == null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

function sync(parent, kids) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.$key !== undefined) keyed.set(child.$key, child);
  let at = parent.firstChild;
  for (const kid of kids) {
    let node = kid.props && kid.props.key !== undefined ? keyed.get(kid.props.key) : at;
    if (node && !fits(node, kid)) node = null;
    if (node && node !== at && at && at.$key !== undefined && !kids.some((each) => each.props && each.props.key === at.$key)) {
      // What is gone leaves first, so that its neighbours need not move.
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
    if (!node) node = create(kid);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    update(node, kid);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function render(parent, ...kids) {
  const focused = document.activeElement;
  sync(parent, h("div", null, kids).kids);
  if (focused !== document.activeElement && focused && focused.isConnected && focused !== document.body) focused.focus({ preventScroll: true });
}

const $ = (id) => document.getElementById(id);

// ---- Texts

const SHORT = { HEALTHY: "good", RUNNING: "good", DEPLOYED: "good", SUCCEEDED: "good", UNHEALTHY: "bad", DEPLOY_FAILED: "bad", FAILED: "bad", TAKEN_BACK: "bad", ABORTED: "bad",
  UPDATING: "busy", UPSCALING: "busy", DOWNSCALING: "busy", DEPLOYING: "busy", STARTING: "busy", RECOVERING: "warn", PENDING_MIGRATION: "warn", DELETING: "busy", STOPPING: "busy", NOT_STARTED: "busy", DRAINING: "warn", PAUSED: "warn", COMPLETED: "good" };
const word = (state) => (state ? String(state).toLowerCase().replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase()) : "Unknown");
const chip = (state, text) => h("span", { class: `chip ${SHORT[state] || ""}` }, text || word(state));

function number(value, unit) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : size >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : size >= 100 || Number.isInteger(value) ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size < 0.005 ? "0" : value.toFixed(2);
  return unit ? `${text} ${unit}` : text;
}
function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = 1000 * value;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}
function span(value) {
  const s = Math.max(0, Math.floor(value));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}
const now = () => Date.now() / 1000 + site.skew;
const age = (at) => (at ? span(now() - at) : "–");
const when = (at) => (at ? new Date(1000 * at).toLocaleString() : "–");
function clock(at) {
  const date = new Date(1000 * at);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return now() - at > 64800 ? `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time.slice(0, 5)}` : time;
}
function bytes(value) {
  const at = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
  return number(value / 1024 ** at, ["B", "KiB", "MiB", "GiB", "TiB"][at]);
}
const plural = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;
/** Show a message; a traceback in it is set as code. */
function messageNote(text, look) {
  const [said, ...code] = text.split(/\n(?=Traceback \(most recent)/);
  return h("div", { class: `note ${look}`, key: "message" }, h("p", null, said), code.length ? h("pre", { tabindex: 0, "aria-label": "Traceback" }, code.join("\n")) : null);
}
const shortId = (id) => String(id).slice(String(id).lastIndexOf("#") + 1);

// ---- State

/** Below which path the scheduler serves, which a reverse proxy may have changed. */
const BASE = new URL(".", document.currentScript.src).href;
const ROOT = new URL("..", BASE).href;
const PERIOD_MS = 1000, SAMPLES = 120, SILENCE_MS = 7000, ANSWER_MS = 30000, MOST_EVENTS = 1000;

const site = {
  instances: null, common: null, instance: "", skew: 0,
  link: "wait", since: Date.now(), trouble: "",
  parts: new Map(), events: [], deployments: [], byTag: new Map(), applications: [],
  rings: new Map(), isDirty: true,
};
const view = { route: [], query: new URLSearchParams(), data: {}, search: "", show: "all", what: "deployments", sort: ["name", 1] };

const part = (name) => site.parts.get(name);
const live = (tag) => part(`live/${tag}`) || {};

/** Work out the list of deployments from the parts. */
function gather() {
  if (!site.isDirty) return;
  site.isDirty = false;
  const apps = [], found = [];
  for (const [name, value] of site.parts) {
    if (!name.startsWith("app/") && name !== "classic") continue;
    const deployments = Object.entries(value.deployments).map(([each, facts]) => ({
      ...facts, name: each, app: value.name, tag: facts.tag || each, isThere: "tag" in facts, key: `${name}\n${each}`,
      replicas: facts.replicas || [], needs: facts.needs || [], dead: facts.dead_replicas || [], states: facts.replica_states || {},
    }));
    found.push(...deployments);
    if (name !== "classic") apps.push({ ...value, deployments, key: name });
  }
  site.applications = apps;
  site.deployments = found;
  site.byTag = new Map(found.map((each) => [each.tag, each]));
}

const isBad = (each) => each.status === "UNHEALTHY" || each.status === "DEPLOY_FAILED";
const isBusy = (each) => SHORT[each.status] === "busy" || (each.rollout && each.rollout.steps);

/** Keep the last values of what is drawn as charts. */
function sample() {
  const keep = (name, value) => {
    let ring = site.rings.get(name);
    if (!ring) site.rings.set(name, (ring = []));
    ring.push({ r: value.requests_per_s, e: value.errors_per_s, p50: value.latency_p50_s, p99: value.latency_p99_s, o: value.ongoing, q: value.queued, t: value.continuous && value.continuous.outputs_per_s });
    if (ring.length > SAMPLES) ring.shift();
    seen.add(name);
  };
  const seen = new Set(), isFew = total(site.deployments, "running") <= 300;
  for (const [name, value] of site.parts) {
    if (!name.startsWith("live/")) continue;
    if (name === "live/") { keep("", value.http || {}); continue; }
    keep(name.slice(5), value);
    const shown = site.byTag.get(name.slice(5));
    if (isFew || (shown && view.route[1] === "app" && shown.app === view.route[2])) for (const id in value.by_replica) keep(id, value.by_replica[id]);
  }
  for (const name of site.rings.keys()) if (!seen.has(name)) site.rings.delete(name);
}

// ---- Connection: one stream of events for all that is shown. It ends while the page is hidden.

let source = null, heard = 0, retry = 0, attempt = 0;

async function ask(path, { patience = ANSWER_MS, ...options } = {}) {
  let reply, text;
  try {
    // A scheduler that is stopped keeps its connections, and never answers.
    reply = await fetch(BASE + path, { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(patience), ...options });
    text = await reply.text();
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? `The scheduler did not answer within ${patience / 1000} s.` : "The scheduler does not answer.");
  }
  let body;
  try { body = JSON.parse(text); } catch { body = { message: text.startsWith("<") ? "" : text.slice(0, 500) }; }
  if (!reply.ok) throw Object.assign(new Error(body.message || `The scheduler answered with ${reply.status}.`), { status: reply.status });
  return body;
}
const api = (path, options) => ask(`${encodeURIComponent(site.instance)}/api/${path}`, options);
const deploymentPath = (each) => `serve/applications/${encodeURIComponent(each.app || "default")}/deployments/${encodeURIComponent(each.name)}`;

function connection(state, text = "") {
  if (site.link === state && site.trouble === text) return;
  const was = site.link;
  if (was !== state) site.since = Date.now();
  site.link = state;
  site.trouble = text;
  if (was === "on" && state !== "on") say("The connection is lost.");
  if (was === "off" && state === "on") say("The connection is back.");
  draw();
}

function disconnect() {
  if (source) source.close();
  source = null;
  clearTimeout(retry);
  attempt++;
}

async function connect() {
  disconnect();
  if (document.hidden) return;
  const mine = attempt, isMine = () => mine === attempt;
  let isFull = false;
  try {
    const found = await ask("instances", { patience: SILENCE_MS });
    if (!isMine()) return;
    isFull = found.is_full;
    site.instances = found.instances;
    site.common = found.common;
    site.version = found.version;
  } catch (error) {
    if (!isMine()) return;
    site.instances = error.status === 404 ? [] : site.instances;
    if (error.status === 404) connection("ended", "No instance of daskserve runs on this cluster any more.");
    else connection("off", error.message);
    retry = setTimeout(connect, 1500);
    return;
  }
  choose();
  if (!site.instance) { connection("none"); retry = setTimeout(connect, 2000); draw(); return; }
  if (!site.instances.includes(site.instance)) {
    connection("ended", `Instance ${site.instance} does not run on this cluster any more.`);
    retry = setTimeout(connect, 2000);
    return;
  }
  if (isFull) {
    connection("off", "As many pages are open already as the scheduler serves.");
    retry = setTimeout(connect, 2000);
    return;
  }
  let got = new Set();
  const opened = (source = new EventSource(`${BASE}${encodeURIComponent(site.instance)}/stream`));
  heard = Date.now();
  const on = (kind, use) => source.addEventListener(kind, (event) => {
    if (opened !== source) return;
    heard = Date.now();
    use(JSON.parse(event.data));
  });
  on("ping", (at) => { site.skew = at - Date.now() / 1000; });
  on("parts", (message) => {
    if (got) {
      for (const name in message.parts) got.add(name);
      message.is_all = got.has("instance");
    }
    if (message.is_all && got) {
      // Only now all parts are known: until then, what was seen before stays. The numbers of events are those
      // of one instance, and another one may have its name since.
      for (const name of site.parts.keys()) if (!got.has(name)) site.parts.delete(name);
      site.events = [];
      site.isDirty = true;
      got = null;
      accept({ ...message, is_all: false });
    } else accept(message);
  });
  on("events", (list) => {
    const last = site.events.length ? site.events[site.events.length - 1].number : -1;
    site.events = site.events.concat(list.filter((each) => each.number > last)).slice(-MOST_EVENTS);
    later();
  });
  on("ended", () => lost(500));
  source.onerror = () => { if (opened === source) lost(800); };
}

function lost(pause) {
  disconnect();
  if (site.link === "on") connection("off", "The connection to the scheduler is lost.");
  retry = setTimeout(connect, pause);
}

function accept({ is_all: isAll, parts }) {
  const before = site.byTag;
  if (isAll) {
    for (const name of site.parts.keys()) if (!(name in parts)) site.parts.delete(name);
  }
  for (const name in parts) {
    site.parts.set(name, parts[name]);
    if (!name.startsWith("live/")) site.isDirty = true;
  }
  if (isAll) site.isDirty = true;
  const controller = part("controller");
  gather();
  for (const each of site.deployments) {
    const old = before.get(each.tag);
    if (old && old.status !== each.status && (isBad(each) || isBad(old))) say(`Deployment ${each.name} is ${word(each.status).toLowerCase()}.`);
  }
  if (controller && !controller.is_online) connection("off", controller.message);
  else connection("on");
  later();
}

/** Show a state that the instance does not have in the address: the common instance, or the only one. */
function choose() {
  const named = view.route[0];
  const chosen = named || site.common || (site.instances && site.instances.length === 1 ? site.instances[0] : "");
  if (chosen !== site.instance) {
    site.instance = chosen;
    Object.assign(site, { parts: new Map(), events: [], rings: new Map(), isDirty: true, link: "wait" });
    view.data = {};
  }
}

document.addEventListener("visibilitychange", () => { if (document.hidden) disconnect(); else connect(); });
setInterval(() => {
  if (source && Date.now() - heard > SILENCE_MS) lost(0);
  if (site.link === "on") sample();
  draw();
}, PERIOD_MS);

// ---- Speaking, and small messages

const spoken = new Map();
function say(text) {
  if (Date.now() - (spoken.get(text) || 0) < 5000) return;
  if (spoken.size > 100) spoken.clear();
  spoken.set(text, Date.now());
  const line = document.createElement("p");
  line.textContent = text;
  $("spoken").append(line);
  while ($("spoken").childNodes.length > 5) $("spoken").firstChild.remove();
}
function toast(text) {
  const node = document.createElement("div");
  node.className = "toast";
  node.textContent = text;
  $("toasts").append(node);
  setTimeout(() => node.remove(), 6000);
}

// ---- Addresses, such as #/INSTANCE/app/APPLICATION/DEPLOYMENT

const to = (...names) => `#/${[site.instance, ...names].map(encodeURIComponent).join("/")}`;
const toDeployment = (each) => to("app", each.app || "", each.name);
function decoded(text) { try { return decodeURIComponent(text); } catch { return text; } }

function follow() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const before = view.route.join("/");
  view.route = path ? path.split("/").map(decoded) : [];
  view.query = new URLSearchParams(query || "");
  const isOther = before !== view.route.join("/");
  if (isOther) { view.data = {}; view.limit = 100; $("dialog").close(); }
  const old = site.instance;
  if (site.instances) choose();
  if (old !== site.instance || (site.instances && !site.instance)) connect();
  draw();
  if (isOther && before) {
    scrollTo(0, 0);
    const title = document.querySelector("main h1");
    if (title) title.focus({ preventScroll: true });
  }
}
addEventListener("hashchange", follow);

// ---- Drawing: at once after an action, otherwise a few times a second

let pending = 0;
function later() { if (!pending) pending = setTimeout(draw, 80); }

function draw() {
  clearTimeout(pending);
  pending = 0;
  gather();
  const stale = site.link === "off" || site.link === "ended";
  $("main").classList.toggle("stale", stale && site.parts.has("instance"));
  drawHeader();
  const text = site.trouble && (site.link === "off" || site.link === "ended") ? `${site.trouble} ${part("instance") ? `What you see is from ${clock(site.since / 1000 + site.skew)}. ` : ""}This page reconnects automatically.` : "";
  render($("banner"), text && h("p", null, text));
  render($("main"), ...page());
  const bad = site.deployments.filter(isBad).length;
  document.title = `${bad ? `(${bad}) ` : ""}${[view.route[3] || view.route[2], site.instance, "daskserve"].filter(Boolean).join(" · ")}`;
}

function drawHeader() {
  const place = view.route[1] || "";
  const tab = (name, text, count) => h("a", { key: text, href: to(...(name ? [name] : [])), "aria-current": (place === name || (!name && place === "app")) && site.instance ? "page" : null }, text, count ? h("span", { class: "count", "aria-label": `${count} problems` }, number(count)) : null);
  const bad = site.deployments.filter(isBad).length;
  const states = { on: ["on", "Live"], off: ["off", "Offline"], ended: ["off", "Ended"], wait: ["wait", "Connecting"], none: ["wait", "Choose"] };
  const [look, text] = states[site.link];
  const names = [...new Set([...(site.instances || []), ...(site.instance ? [site.instance] : [])])];
  const next = { "": ["dark", "Dark"], dark: ["light", "Light"], light: ["", "Automatic"] }[theme()];
  render($("header"), h("div", { class: "bar" },
    h("a", { class: "brand", href: site.instance ? to() : "#/" }, h("img", { src: `${BASE}icon.svg`, alt: "" }), "daskserve"),
    names.length > 1 ? h("select", { "aria-label": "Instance", onchange: (event) => { location.hash = `#/${encodeURIComponent(event.target.value)}`; } },
      !site.instance ? h("option", { value: "", key: "" }, "Choose an instance") : null,
      names.map((each) => h("option", { key: each, value: each, selected: each === site.instance }, each))) : null,
    site.instance ? h("nav", { class: "tabs", "aria-label": "Pages" }, tab("", "Overview", bad), tab("graph", "Graph"), tab("events", "Events"), tab("logs", "Logs"), tab("system", "System")) : h("span", { class: "tabs" }),
    h("span", { class: `live ${look}`, title: text }, h("i", { "aria-hidden": "true" }), h("span", null, text)),
    h("button", { class: "plain", type: "button", title: `Change to ${next[1].toLowerCase()} colours`, "aria-label": `Change to ${next[1].toLowerCase()} colours`, onclick: () => { theme(next[0]); draw(); } }, h("svg", { width: 18, height: 18, viewBox: "0 0 18 18", "aria-hidden": "true" }, h("circle", { cx: 9, cy: 9, r: 7.2, fill: "none", stroke: "currentColor", "stroke-width": 1.6 }), h("path", { d: "M9 1.8a7.2 7.2 0 0 1 0 14.4z", fill: "currentColor" })))));
}

function theme(wanted) {
  let chosen = document.documentElement.className;
  if (wanted === undefined) return chosen;
  document.documentElement.className = wanted;
  try { localStorage.setItem("daskserve-theme", wanted); } catch { /* not allowed here */ }
  return wanted;
}
try { theme({ dark: "dark", light: "light" }[localStorage.getItem("daskserve-theme")] || ""); } catch { /* not allowed here */ }

function page() {
  if (!site.instance) return [h("div", { key: "choose", class: "center" }, chooser())];
  if (!part("instance")) return [h("div", { key: "wait", class: "center" }, h("h1", { tabindex: -1 }, { ended: "This instance has ended", off: "Offline" }[site.link] || "Connecting"), h("p", { class: "soft" }, site.trouble || `Waiting for instance ${site.instance}.`), site.link === "ended" ? chooser() : null)];
  const kind = view.route[1] || "";
  const pages = { "": overviewPage, app: view.route.length > 3 ? deploymentPage : applicationPage, graph: graphPage, events: eventsPage, logs: logsPage, system: systemPage };
  const make = pages[kind] || (() => missing("page", kind));
  return [h("div", { key: view.route.slice(1).join("\n") || "overview", class: "data" }, make())];
}

function chooser() {
  if (!site.instances) return h("p", { class: "empty" }, "Connecting to the scheduler.");
  if (!site.instances.length) return [h("h1", { tabindex: -1 }, "No instance runs"), h("p", { class: "soft" }, "Start one with ", h("code", null, "daskserve start"), " or ", h("code", null, "serve.run(app)"), "; it appears here.")];
  return h("section", { class: "card" }, h("div", { class: "top" }, h("h1", { tabindex: -1 }, "Instances")), h("ul", { class: "items" }, site.instances.map((each) => h("li", { key: each }, h("a", { href: `#/${encodeURIComponent(each)}` }, each)))));
}
const missing = (what, name) => h("div", { class: "center" }, h("h1", { tabindex: -1 }, `No ${what} ${name}`), h("p", { class: "soft" }, "It was deleted, or its name is another one."), h("p", null, h("a", { href: to() }, "Back to the overview")));
const card = (title, props, top, ...body) => h("section", { class: "card", key: title, "aria-label": title, ...props }, h("div", { class: "top" }, h("h2", null, title), top), body);

// ---- Charts

/** Draw the last two minutes of a value of a ring, and of another one as a dashed line. */
function spark(ring, field, props = {}, second = "") {
  const points = props.step ? means(ring || [], field, props.step) : ring || [];
  const whole = props.step ? SAMPLES / props.step : SAMPLES;
  const most = highest(points, field, second);
  const line = (name) => {
    let path = "", isOn = false;
    points.forEach((each, index) => {
      const value = each[name];
      if (value == null) { isOn = false; return; }
      const x = whole - points.length + index, y = most ? 38 - 36 * (value / most) : 38;
      path += `${isOn ? "L" : "M"}${x} ${y.toFixed(1)}`;
      isOn = true;
    });
    return path;
  };
  const top = line(field);
  const start = whole - points.length;
  const isWhole = points.length > 1 && points.every((each) => each[field] != null);
  return h("svg", { class: `spark ${props.class || ""}`, viewBox: `0 0 ${whole - 1} 40`, preserveAspectRatio: "none", "aria-hidden": "true" },
    isWhole ? h("path", { class: "area", d: `${top}L${whole - 1} 40L${start} 40Z` }) : null,
    h("path", { class: "line", d: top || "M0 38" }),
    second ? h("path", { class: "line second", d: line(second) || "M0 38" }) : null);
}
const highest = (points, field, second) => points.reduce((most, each) => Math.max(most, each[field] || 0, (second && each[second]) || 0), 0);
/** Say what the lines of a chart are, and what its height and width stand for. */
const legend = (ring, text, names, field, second) => h("p", { class: "legend" }, names.map((each, index) => h("span", { key: each, class: index ? "line second" : "line" }, each)), h("span", { key: "most" }, `max ${text((ring || []).some((each) => each[field] != null) ? highest(ring, field, second) : null)} · ${span(SAMPLES * PERIOD_MS / 1000)}`));
/** Return the means of each few values, for drawings that are small. */
function means(ring, field, step) {
  const found = [];
  for (let end = ring.length; end > 0; end -= step) {
    const few = ring.slice(Math.max(0, end - step), end).map((each) => each[field]).filter((each) => each != null);
    found.push({ [field]: few.length ? few.reduce((sum, each) => sum + each, 0) / few.length : null });
  }
  return found.reverse();
}
const pair = (text, ring, field, look) => h("div", { class: "pair" }, spark(ring, field, { class: look, step: 4 }), h("span", null, text));
const tile = (name, value, unit, chart) => h("div", { class: "card tile", key: name }, h("p", { class: "name" }, name), h("p", { class: "value" }, value, unit ? h("small", null, unit) : null), chart);

/** Draw how many of a whole are in each state. */
const shares = (list) => h("div", null, h("div", { class: "shares", "aria-hidden": "true" }, list.filter(([, count]) => count).map(([look, count]) => h("span", { key: look, class: look, style: { "flex-grow": count } }))), h("p", { class: "soft small" }, list.filter(([, count]) => count).map(([, count, text]) => `${number(count)} ${text}`).join(" · ")));

// ---- Tables: only rows that are seen are in the document

const tables = new Map();

/**
 * @param {string} name of the table, for people
 * @param {object[]} columns with title, value (for sorting), cell, class and width
 * @param {object[]} list with a key each
 */
function grid(name, columns, list, options = {}) {
  const state = tables.get(name) || { sort: options.sort || [columns[0].title, 1], order: [], at: 0 };
  tables.set(name, state);
  const [title, way] = state.sort;
  const column = columns.find((each) => each.title === title) || columns[0];
  // Values that change each second would make rows jump under the pointer.
  const known = new Map(list.map((each) => [each.key, each]));
  const isSame = state.order.length === list.length && state.order.every((key) => known.has(key));
  const isHeld = state.body && (state.body.matches(":hover") || state.body.contains(document.activeElement));
  if (!isSame || state.of !== column.title + way || (Date.now() - state.at > 3000 && !isHeld)) {
    const value = (each) => column.value(each) ?? -1;
    state.order = [...list].sort((a, b) => {
      const x = value(a), y = value(b);
      return (x < y ? -way : x > y ? way : 0) || (a.key < b.key ? -1 : 1);
    }).map((each) => each.key);
    state.at = Date.now();
    state.of = column.title + way;
  }
  const rows = state.order.map((key) => known.get(key));
  const head = h("div", { role: "rowgroup" }, h("div", { role: "row", class: "row headrow", "aria-rowindex": 1 }, columns.map((each) =>
    h("div", { role: "columnheader", key: each.title, class: `cell ${each.class || ""} ${each.value ? "" : "nosort"}`, "aria-sort": !each.value ? null : each === column ? (way > 0 ? "ascending" : "descending") : "none" },
      each.value ? h("button", { type: "button", onclick: () => { state.sort = [each.title, each === column ? -way : each.first || 1]; draw(); } }, each.title, each === column ? h("span", { "aria-hidden": "true" }, way > 0 ? "↑" : "↓") : null) : h("span", { class: each.isQuiet ? "hidden" : "" }, each.title)))));
  const width = columns.map((each) => each.width || "minmax(72px, 1fr)");
  const small = innerWidth <= 760, isOff = (each) => (innerWidth <= 1200 && /wide/.test(each.class)) || (innerWidth <= 1000 && /narrow-off/.test(each.class));
  const size = small ? 84 : 48;
  const used = columns.map((each, index) => (isOff(each) ? "" : width[index])).join(" ");
  const make = (each, index) => h("div", { role: "row", class: "row", key: each.key, "aria-rowindex": index + 2, style: { transform: `translateY(${index * size}px)` } },
    columns.map((kind) => h("div", { role: "cell", class: `cell ${kind.class || ""}`, key: kind.title }, h("span", { class: "label", "aria-hidden": "true" }, kind.label ?? (kind.class && /first|state/.test(kind.class) ? null : kind.title)), kind.cell(each))));
  const window = { rows, size, make, state };
  const body = h("div", { role: "rowgroup", class: "rows", own: true, key: "rows", style: { height: `${rows.length * size}px` }, onkeydown: (event) => step(event, name) });
  state.window = window;
  queueMicrotask(() => fill(name));
  return h("div", { class: "grid", role: rows.length ? "table" : null, "aria-label": rows.length ? name : null, "aria-rowcount": rows.length ? rows.length + 1 : null, "data-table": name, style: { "--columns": used } }, rows.length ? [head, body] : h("p", { class: "empty" }, options.empty || "Nothing here."));
}

function fill(name) {
  const state = tables.get(name);
  const host = [...document.querySelectorAll(".grid")].find((each) => each.dataset.table === name);
  const body = host && host.querySelector(".rows");
  if (!body) return;
  state.body = body;
  const { rows, size, make } = state.window;
  const top = body.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(-top / size) - 4), last = Math.min(rows.length, Math.ceil((innerHeight - top) / size) + 4);
  const shown = [];
  const focused = body.contains(document.activeElement) ? document.activeElement.closest(".row") : null;
  const kept = focused ? rows.findIndex((each) => each.key === focused.$key) : -1;
  if (kept >= 0 && kept < first) shown.push(make(rows[kept], kept));
  for (let index = first; index < last; index++) shown.push(make(rows[index], index));
  if (kept >= 0 && kept >= last) shown.push(make(rows[kept], kept));
  render(body, ...shown);
}
let scrolling = 0;
const refill = () => { if (!scrolling) scrolling = requestAnimationFrame(() => { scrolling = 0; for (const name of tables.keys()) fill(name); }); };
addEventListener("scroll", refill, { passive: true });
addEventListener("resize", () => draw());

/** Move between rows by keys. */
function step(event, name) {
  const { rows, size, state } = tables.get(name).window;
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
  const row = event.target.closest(".row");
  if (!by || !row) return;
  event.preventDefault();
  const from = rows.findIndex((each) => each.key === row.$key);
  const at = Math.min(rows.length - 1, Math.max(0, from + by));
  const y = state.body.getBoundingClientRect().top + scrollY + at * size;
  if (y < scrollY + 160) scrollTo(0, y - 160);
  else if (y + size > scrollY + innerHeight) scrollTo(0, y + size - innerHeight + 16);
  fill(name);
  const found = [...state.body.children].find((each) => each.$key === rows[at].key);
  const link = found && found.querySelector("a, button");
  if (link) link.focus({ preventScroll: true });
  fill(name);
}

const deploymentColumns = (hasApp) => [
  { title: "Deployment", class: "first", width: "minmax(150px, 2.2fr)", value: (each) => each.key, cell: (each) => h("div", { class: "named" }, h("a", { href: toDeployment(each), title: each.name }, each.name), each.actor_of ? h("span", { class: "soft small" }, "actor") : null, hasApp ? h("span", { class: "soft small", title: each.app }, each.app || "no application") : null) },
  { title: "Status", class: "state", width: "124px", value: (each) => ({ bad: 0, busy: 1, warn: 1 })[SHORT[each.status]] ?? 2, cell: (each) => chip(each.status) },
  { title: "Replicas", class: "num", width: "76px", value: (each) => each.running, first: -1, cell: (each) => `${each.running ?? 0} / ${each.wanted ?? 0}` },
  { title: "Requests/s", class: "num", width: "132px", value: (each) => live(each.tag).requests_per_s, first: -1, cell: (each) => pair(number(live(each.tag).requests_per_s), site.rings.get(each.tag), "r") },
  { title: "Errors/s", class: "num narrow-off", width: "72px", value: (each) => live(each.tag).errors_per_s, first: -1, cell: (each) => { const rate = live(each.tag).errors_per_s; return h("span", { class: rate > 0.005 ? "bad" : "" }, number(rate)); } },
  { title: "Median", class: "num wide narrow-off", width: "76px", value: (each) => live(each.tag).latency_p50_s, first: -1, cell: (each) => seconds(live(each.tag).latency_p50_s) },
  { title: "p99", class: "num", width: "140px", value: (each) => live(each.tag).latency_p99_s, first: -1, cell: (each) => pair(seconds(live(each.tag).latency_p99_s), site.rings.get(each.tag), "p99") },
  { title: "Running", class: "num wide narrow-off", width: "72px", value: (each) => live(each.tag).ongoing, first: -1, cell: (each) => number(live(each.tag).ongoing) },
  { title: "Queued", class: "num narrow-off", width: "72px", value: (each) => live(each.tag).queued, first: -1, cell: (each) => number(live(each.tag).queued) },
  { title: "Age", class: "num wide narrow-off", width: "60px", value: (each) => each.deployed_at, first: -1, cell: (each) => h("span", { title: when(each.deployed_at) }, age(each.deployed_at)) },
];
const applicationColumns = [
  { title: "Application", class: "first", width: "minmax(160px, 2fr)", value: (each) => each.name, cell: (each) => h("div", null, h("a", { href: to("app", each.name), title: each.name }, each.name)) },
  { title: "Status", class: "state", width: "148px", value: (each) => ({ bad: 0, busy: 1 })[SHORT[each.status]] ?? 2, cell: (each) => chip(each.status) },
  { title: "Route", width: "minmax(96px, 1fr)", value: (each) => each.route_prefix || "", cell: (each) => h("div", { class: "cut" }, each.route_prefix || "–") },
  { title: "Deployments", class: "num", width: "116px", value: (each) => each.deployments.length, first: -1, cell: (each) => number(each.deployments.length) },
  { title: "Replicas", class: "num", width: "96px", value: (each) => total(each.deployments, "running"), first: -1, cell: (each) => `${number(total(each.deployments, "running"))} / ${number(total(each.deployments, "wanted"))}` },
  { title: "Deployed", class: "num wide narrow-off", width: "96px", value: (each) => each.last_deployed_time_s, first: -1, cell: (each) => h("span", { title: when(each.last_deployed_time_s) }, age(each.last_deployed_time_s)) },
];
const total = (list, name) => list.reduce((sum, each) => sum + (each[name] || 0), 0);

// ---- Pages

function overviewPage() {
  const all = site.deployments, traffic = (part("live/") || {}).http || {}, ring = site.rings.get("");
  const bad = all.filter(isBad), busy = all.filter((each) => each.rollout && each.rollout.steps);
  const changing = all.filter((each) => SHORT[each.status] === "busy").length, running = total(all, "running");
  const problems = Object.entries((part("instance") || {}).problems || {});
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (each, text) => words.every((one) => text.includes(one));
  const isApps = view.what === "applications";
  const source = isApps ? site.applications : all;
  const list = source.filter((each) => (view.show === "all" || (view.show === "bad" ? isBad(each) : isBusy(each))) && (!words.length || fits(each, `${each.name} ${each.app || ""} ${each.status} ${each.route_prefix || ""}`.toLowerCase())));
  return [
    h("div", { class: "head", key: "head" }, h("div", null, h("h1", { tabindex: -1 }, "Overview"), h("p", { class: "soft small" }, urls()))),
    h("div", { class: "tiles five", key: "tiles" },
      tile("Applications", number(site.applications.length), plural(all.length, "deployment"), shares([["good", all.length - bad.length - changing, "healthy"], ["busy", changing, "in change"], ["bad", bad.length, "failing"]])),
      tile("Replicas running", number(running), `of ${number(total(all, "wanted"))}`, shares([["good", running, "running"], ["busy", Math.max(0, total(all, "wanted") - running), "missing"]])),
      tile("Requests over HTTP", number(traffic.requests_per_s), "per second", [spark(ring, "r"), legend(ring, number, [], "r")]),
      tile("Errors over HTTP", number(traffic.errors_per_s), "per second", [spark(ring, "e", { class: "errors" }), legend(ring, number, [], "e")]),
      tile("Latency, p99", seconds(traffic.latency_p99_s), `median ${seconds(traffic.latency_p50_s)}`, [spark(ring, "p99", {}, "p50"), legend(ring, seconds, ["p99", "median"], "p99", "p50")])),
    bad.length || problems.length ? card("Problems", {}, h("span", { class: "soft small" }, plural(bad.length + problems.length, "problem")), h("ul", { class: "items" },
      problems.map(([name, text]) => h("li", { key: `p${name}` }, h("h3", null, name), h("p", { class: "note bad" }, text))),
      bad.slice(0, 5).map((each) => h("li", { key: each.key }, h("div", { class: "title" }, h("h3", null, h("a", { href: toDeployment(each) }, each.name)), chip(each.status), h("span", { class: "soft small" }, each.app)), each.message ? h("p", { class: "note bad" }, firstLines(each.message.split("\nTraceback")[0])) : null)),
      bad.length > 5 ? h("li", { key: "more" }, h("button", { type: "button", onclick: () => { view.show = "bad"; view.what = "deployments"; draw(); } }, `Show all ${number(bad.length)} in the table`)) : null)) : null,
    busy.length ? card("Rollouts", {}, null, h("ul", { class: "items" }, busy.slice(0, 10).map((each) => h("li", { key: each.key }, h("div", { class: "title" }, h("h3", null, h("a", { href: toDeployment(each) }, each.name)), h("span", { class: "soft small" }, each.app)), rolloutBody(each))))) : null,
    h("section", { class: "card", key: "table", "aria-label": "Deployments and applications" }, h("div", { class: "top" },
      h("h2", { class: "hidden" }, "Deployments and applications"),
      h("div", { class: "choices", role: "group", "aria-label": "What the table lists" }, ["deployments", "applications"].map((each) => h("button", { type: "button", key: each, "aria-pressed": String(view.what === each), onclick: () => { view.what = each; draw(); } }, word(each)))),
      h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search the table", value: view.search, oninput: (event) => { view.search = event.target.value; draw(); } }),
      h("select", { "aria-label": "States", onchange: (event) => { view.show = event.target.value; draw(); } }, [["all", "All states"], ["bad", "Problems"], ["busy", "In change"]].map(([value, text]) => h("option", { key: value, value, selected: view.show === value }, text))),
      h("span", { class: "soft small", role: "status" }, list.length === source.length ? number(list.length) : `${number(list.length)} of ${number(source.length)}`)),
      isApps ? grid("Applications", applicationColumns, list, { empty: "No application fits." }) : grid("Deployments", deploymentColumns(true), list, { empty: all.length ? "No deployment fits." : NOTHING_RUNS })),
  ];
}
const NOTHING_RUNS = ["No application runs yet. Deploy one with ", h("code", null, "daskserve deploy"), " or ", h("code", null, "serve.run()"), "."];
const firstLines = (text) => String(text).split("\n").slice(0, 3).join("\n").slice(0, 1000);
function urls(route = "") {
  const found = ((part("instance") || {}).http_urls || []).filter((each) => /^https?:/.test(each));
  if (!found.length) return "No HTTP proxy listens.";
  return ["Serves at ", found.slice(0, 4).map((each, index) => [index ? ", " : "", h("a", { key: each, href: each + route, target: "_blank", rel: "noreferrer" }, each + route)]), found.length > 4 ? ` and ${found.length - 4} more` : ""];
}

function applicationPage() {
  const app = site.applications.find((each) => each.name === view.route[2]);
  if (!app) return missing("application", view.route[2]);
  const history = wanted(`serve/applications/${encodeURIComponent(app.name)}/history`, `${app.last_deployed_time_s} ${app.status}`);
  const revisions = history && history.revisions ? [...history.revisions].reverse() : [];
  return [
    h("div", { class: "head", key: "head" },
      h("div", null, h("p", { class: "crumbs" }, h("a", { href: to() }, "Overview"), " / Application"), h("div", { class: "title" }, h("h1", { tabindex: -1 }, app.name), chip(app.status)), h("p", { class: "soft small" }, app.route_prefix ? urls(app.route_prefix) : "It has no route", ` · deployed ${age(app.last_deployed_time_s)} ago`)),
      h("div", { class: "acts" }, action("Roll back", () => rollBack(app)), action("Restart", () => confirmed({ title: `Restart ${app.name}?`, text: "All of its replicas are replaced by ones of the same code, a few at a time, without failing requests.", button: "Restart", done: `${app.name} restarts.`, act: () => api(`serve/applications/${encodeURIComponent(app.name)}/restart`, { method: "POST" }) })))),
    app.message ? messageNote(app.message, SHORT[app.status] || "warn") : null,
    card("Graph", {}, null, graph(app.deployments)),
    card("Deployments", {}, h("span", { class: "soft small" }, number(app.deployments.length)), grid(`Deployments of ${app.name}`, deploymentColumns(false), app.deployments)),
    h("div", { class: "columns", key: "columns" },
      card("Revisions", {}, null, revisions.length ? h("ul", { class: "items" }, revisions.slice(0, 20).map((each) => h("li", { key: each.number }, revisionText(each, history.current)))) : h("p", { class: "empty" }, history && history.error ? history.error : "None yet.")),
      card("Events", {}, null, eventList(site.events.filter((each) => each.application === app.name), 20, app.name))),
  ];
}
function revisionText(each, current) {
  const changes = (each.changes || []).map((one) => `${one.deployment}: ${one.what}`);
  return [h("div", { class: "title" }, h("h3", null, `Revision ${each.number}`), chip(each.number === current ? "RUNNING" : each.state, each.number === current ? "Runs" : null), h("span", { class: "soft small", title: when(each.at) }, `${age(each.at)} ago`)),
    h("p", { class: "soft small" }, [each.by && `by ${each.by}`, changes.slice(0, 6).join(", "), changes.length > 6 && `and ${changes.length - 6} more`, each.rollback_of && `rolls back to ${each.rollback_of}`].filter(Boolean).join(" · ")),
    each.reason ? h("p", { class: "note bad" }, firstLines(each.reason)) : null];
}

function deploymentPage() {
  const [, , app, name] = view.route;
  const each = site.deployments.find((one) => one.app === app && one.name === name);
  if (!each) return missing("deployment", name);
  const now = live(each.tag), ring = site.rings.get(each.tag);
  const explained = each.actor_of || !each.isThere ? null : wanted(`${deploymentPath(each)}/explain`, `${each.running} ${each.wanted} ${each.status}`, 5000);
  const by = now.by_replica || {}, batch = now.continuous;
  const rows = each.replicas.map((one) => ({ ...one, key: one.id, live: by[one.id] || {} }));
  return [
    h("div", { class: "head", key: "head" },
      h("div", null, h("p", { class: "crumbs" }, h("a", { href: to() }, "Overview"), " / ", app ? h("a", { href: to("app", app) }, app) : "no application", " / Deployment"),
        h("div", { class: "title" }, h("h1", { tabindex: -1 }, name), chip(each.status), each.is_ingress ? h("span", { class: "chip tag" }, "Ingress") : null),
        h("p", { class: "soft small" }, [each.version && `Version ${each.version}`, each.deployed_at && `deployed ${age(each.deployed_at)} ago`, each.needs.length && `calls ${each.needs.join(", ")}`, each.max_ongoing && `up to ${number(each.max_ongoing)} requests at a time in each replica`].filter(Boolean).join(" · "))),
      each.actor_of || !each.isThere ? null : h("div", { class: "acts" }, h("a", { class: "button", href: logsOf(each) }, "Logs"), action("Scale", () => scale(each)), action("Restart", () => confirmed({ title: `Restart ${name}?`, text: `Its ${plural(each.running, "replica")} are replaced by ones of the same code, a few at a time, without failing requests.`, button: "Restart", done: `${name} restarts.`, act: () => api(`${deploymentPath(each)}/restart`, { method: "POST" }) })))),
    each.message ? messageNote(each.message, SHORT[each.status] === "good" ? "warn" : SHORT[each.status] || "") : null,
    !each.isThere ? null : h("div", { class: "tiles", key: "tiles" },
      h("div", { class: "card tile big", key: "r" }, h("p", { class: "name" }, "Requests per second"), h("p", { class: "value" }, number(now.requests_per_s), h("small", null, `${number(now.errors_per_s)} failed`)), spark(ring, "r", {}, "e"), legend(ring, number, ["all", "failed"], "r", "e")),
      h("div", { class: "card tile big", key: "l" }, h("p", { class: "name" }, "Latency, p99"), h("p", { class: "value" }, seconds(now.latency_p99_s), h("small", null, `median ${seconds(now.latency_p50_s)}`)), spark(ring, "p99", {}, "p50"), legend(ring, seconds, ["p99", "median"], "p99", "p50")),
      h("div", { class: "card tile big", key: "o" }, h("p", { class: "name" }, "Requests in replicas"), h("p", { class: "value" }, number(now.ongoing), h("small", null, `${number(now.queued)} queued`)), spark(ring, "o", {}, "q"), legend(ring, number, ["running", "queued"], "o", "q")),
      h("div", { class: "card tile big", key: "n" }, h("p", { class: "name" }, "Replicas"), h("p", { class: "value" }, number(each.running), h("small", null, `of ${number(each.wanted)}`)), h("ul", null, Object.entries(each.states).map(([state, count]) => h("li", { key: state, class: "small" }, `${number(count)} ${word(state).toLowerCase()}`))), each.autoscaling ? h("p", { class: "soft small" }, `Autoscaled from ${each.autoscaling[0]} to ${each.autoscaling[1]}`) : null)),
    each.isThere && batch ? h("div", { class: "tiles", key: "batch" },
      h("div", { class: "card tile big", key: "t" }, h("p", { class: "name" }, "Outputs per second, such as tokens"), h("p", { class: "value" }, number(batch.outputs_per_s)), spark(ring, "t"), legend(ring, number, [], "t")),
      h("div", { class: "card tile big", key: "s" }, h("p", { class: "name" }, "Slots of the continuous batch"), h("p", { class: "value" }, number(batch.active), h("small", null, `of ${number(batch.slots)} taken`)), h("p", { class: "soft small" }, batch.queued ? `${plural(batch.queued, "request")} ${batch.queued === 1 ? "waits" : "wait"} for a slot` : "No request waits for a slot"))) : null,
    each.rollout ? card("Rollout", {}, each.rollout.steps ? h("div", { class: "acts" }, rolloutAction(each, "pause", "Pause"), rolloutAction(each, "promote", "Promote"), rolloutAction(each, "abort", "Abort")) : null, h("div", { class: "body" }, rolloutBody(each))) : null,
    each.dead.length ? card("Errors", {}, h("span", { class: "soft small" }, `${plural(each.dead.length, "replica")} lost or failed lately`), h("ul", { class: "items" }, [...each.dead].reverse().map((one) => h("li", { key: `${one.name}${one.at}` },
      h("div", { class: "title" }, h("h3", { class: "mono" }, shortId(one.name)), h("span", { class: "soft small", title: when(one.at) }, `${age(one.at)} ago`)),
      h("p", { class: "note bad" }, firstLines(one.reason)),
      one.user_traceback ? h("details", { open: one === each.dead[each.dead.length - 1] }, h("summary", null, "Traceback"), h("pre", { tabindex: 0, "aria-label": "Traceback" }, one.user_traceback)) : null,
      one.last_lines && one.last_lines.length ? h("details", null, h("summary", null, "Last lines of its log"), h("pre", { tabindex: 0, "aria-label": "Log" }, one.last_lines.join("\n"))) : null)))) : null,
    !each.isThere ? null : card("Replicas", {}, h("span", { class: "soft small" }, number(rows.length)), grid(`Replicas of ${name}`, replicaColumns(each, rows.some((one) => one.models && one.models.count != null), batch), rows, { empty: "No replica." })),
    h("div", { class: "columns", key: "columns" },
      each.actor_of || !each.isThere ? null : card("Why this many replicas", {}, null, h("div", { class: "body" }, explained ? explanation(explained) : h("p", { class: "soft" }, "Asking."))),
      card("Events", {}, null, eventList(site.events.filter((one) => (each.isThere ? one.deployment === each.tag : one.application === app)), 20, app))),
  ];
}
const logsOf = (each, replica) => `${to("logs")}?${new URLSearchParams({ application: each.app, deployment: each.name, ...(replica ? { replica: replica.id } : {}) })}`;
const modelsColumn = { title: "Models", class: "narrow-off", width: "minmax(88px, 1fr)", value: (each) => each.models && each.models.count, first: -1, cell: (each) => { const it = each.models || {}, names = (it.models || []).join(", "); return h("div", { class: "cut", title: names }, it.count == null ? "–" : `${number(it.count)}${it.capacity ? ` / ${number(it.capacity)}` : ""}`, names ? h("span", { class: "soft small" }, `  ${names}`) : null); } };
const replicaColumns = (deployment, hasModels, hasBatch) => [
  { title: "Replica", class: "first", width: "minmax(96px, 1.2fr)", value: (each) => each.id, cell: (each) => h("div", { class: "mono", title: each.id }, h("a", { href: logsOf(deployment, each) }, shortId(each.id)), each.is_old ? h("span", { class: "soft", title: "It runs the old version" }, " old") : null) },
  { title: "State", class: "state", width: "112px", value: (each) => each.state, cell: (each) => h("span", { title: each.message || null }, chip(each.message && each.state === "RUNNING" ? "UNHEALTHY" : each.state)) },
  { title: "Worker", width: "minmax(80px, 1.4fr)", value: (each) => each.worker || "", cell: (each) => h("div", { title: each.worker || "" }, each.worker ? each.worker_name || each.worker : "waits for a worker", each.host ? h("span", { class: "soft small" }, `  ${each.host}`) : null) },
  { title: "Requests/s", class: "num", width: "108px", value: (each) => each.live.requests_per_s, first: -1, cell: (each) => pair(number(each.live.requests_per_s), site.rings.get(each.id), "r") },
  ...(hasModels || hasBatch ? [] : [{ title: "Errors/s", class: "num wide narrow-off", width: "68px", value: (each) => each.live.errors_per_s, first: -1, cell: (each) => number(each.live.errors_per_s) }]), // no room
  { title: "p99", class: "num", width: "116px", value: (each) => each.live.latency_p99_s, first: -1, cell: (each) => pair(seconds(each.live.latency_p99_s), site.rings.get(each.id), "p99") },
  { title: "Running", class: `num narrow-off ${hasModels || hasBatch ? "wide" : ""}`, width: "60px", value: (each) => each.live.ongoing, first: -1, cell: (each) => number(each.live.ongoing) },
  ...(hasModels || hasBatch ? [] : [{ title: "Queued", class: "num wide narrow-off", width: "64px", value: (each) => each.live.queued, first: -1, cell: (each) => number(each.live.queued) }]),
  { title: "Age", class: `num narrow-off ${hasModels || hasBatch ? "wide" : ""}`, width: "52px", value: (each) => each.since, first: -1, cell: (each) => h("span", { title: when(each.since) }, age(each.since)) },
  ...(hasBatch ? [
    { title: "Slots", class: "num narrow-off", width: "52px", value: (each) => each.live.continuous && each.live.continuous.active, first: -1, cell: (each) => { const it = each.live.continuous; return it ? `${number(it.active)}/${number(it.slots)}` : "–"; } },
    { title: "Outputs/s", class: "num narrow-off", width: "72px", value: (each) => each.live.continuous && each.live.continuous.outputs_per_s, first: -1, cell: (each) => number((each.live.continuous || {}).outputs_per_s) },
  ] : []),
  ...(hasModels ? [modelsColumn] : []),
  { title: "Look inside", isQuiet: true, label: "", width: "196px", class: "narrow-off", cell: (each) => h("div", { class: "acts tight" }, h("a", { class: "button slim", href: logsOf(deployment, each), "aria-label": `Logs of ${shortId(each.id)}` }, "Logs"), h("button", { class: "slim", type: "button", "aria-label": `Profile ${shortId(each.id)}`, onclick: () => profile(each) }, "Profile"), h("button", { class: "slim", type: "button", "aria-label": `Stacks of ${shortId(each.id)}`, onclick: () => stacks(each) }, "Stacks")) },
];

function rolloutBody(each) {
  const it = each.rollout;
  const facts = [["State", chip(["STARTING", "SERVING", "WATCHING"].includes(it.state) ? "UPDATING" : it.state, word(it.state))], ["Versions", `${it.version} beside ${it.stable}`], ["Since", `${age(it.began_at)} ago`]];
  if (it.why) facts.push(["Reason", it.why]);
  if (it.requests) facts.push(["Requests", `${number(it.requests.candidate.ended)} of the new version, ${number(it.requests.candidate.failed)} failed; ${number(it.requests.stable.ended)} of the old, ${number(it.requests.stable.failed)} failed`]);
  if (it.shadowed) facts.push(["Copies", `${number(it.shadowed.different)} of ${number(it.shadowed.compared)} compared answers differ${it.shadowed.failed ? `; ${number(it.shadowed.failed)} could not be compared: ${it.shadowed.trouble}` : ""}`]);
  if (it.waiting) facts.push(["Waits for", it.waiting]);
  if ((it.gates || []).length) facts.push(["Gates", h("ul", null, it.gates.map((gate, index) => h("li", { key: index, class: gate.is_worse ? "bad" : "" }, gate.text || gate.metric)))]);
  return h("div", { class: "stack" },
    it.steps ? h("ol", { class: "steps", "aria-label": `Step ${it.step} of ${it.steps.length}` }, it.steps.map((one, index) => h("li", { key: index, class: index + 1 < it.step ? "done" : index + 1 === it.step ? "now" : "", "aria-current": index + 1 === it.step ? "step" : null }, String(one)))) : null,
    it.share == null ? null : h("p", null, `${number(Math.round(1000 * it.share) / 10)} % of the traffic goes to the new version.`),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", { key: `t${name}` }, name), h("dd", { key: `d${name}` }, value)])));
}
function explanation(it) {
  if (it.error) return h("p", { class: "soft" }, it.error);
  const lines = [];
  if (it.is_external) lines.push("A scaler outside of the cluster sets the number of replicas; until then, num_replicas does.");
  else if (!it.policy) lines.push("There is no autoscaling: num_replicas, or the last Scale, sets the number of replicas.");
  else lines.push(`${it.policy}${it.group ? `, of group ${it.group},` : ""} ${it.policy_wants == null ? "has not run yet" : `wants ${it.policy_wants}`}, of ${it.min_replicas} to ${it.max_replicas} allowed${it.is_dry_run ? " (dry run: decisions are not applied)" : ""}${it.reason ? `: ${it.reason}` : ""}`);
  if (it.target_capacity != null) lines.push(`The instance has a target capacity of ${number(it.target_capacity)} %.`);
  if (it.waiting) lines.push(`Waiting: ${it.waiting}`);
  return [h("p", null, h("strong", null, `${it.running} of ${it.wanted} wanted replicas run.`)), lines.map((each, index) => h("p", { key: index }, each)),
    (it.samples || []).length ? h("div", { class: "scroll", key: "load", tabindex: 0, role: "group", "aria-label": "Load" }, h("table", { class: "sheet" }, h("caption", { class: "hidden" }, "Load, newest first"), h("thead", null, h("tr", null, h("th", { scope: "col" }, "Load"), ["Running", "Queued", "Per second"].map((each) => h("th", { key: each, scope: "col", class: "num" }, each)))), h("tbody", null, it.samples.slice(-6).reverse().map((each, index) => h("tr", { key: index }, h("td", null, `${span(each.ago_s)} ago`), [each.ongoing, each.queued, each.rate].map((one, at) => h("td", { key: at, class: "num" }, number(one)))))))) : null,
    (it.events || []).length ? h("ul", { key: "changes" }, it.events.slice(-8).reverse().map(([at, before, after, reason]) => h("li", { key: at, class: "small" }, h("span", { class: "soft" }, `${clock(at)}  `), `${before} → ${after}: ${reason}`))) : null];
}

function eventsPage() {
  const text = (view.data.text || "").toLowerCase(), kind = view.data.kind || "";
  const list = site.events.filter((each) => (!kind || (kind === "bad" ? isProblem(each) : each.kind === kind)) && (!text || `${each.message} ${each.application} ${each.deployment} ${each.subject} ${each.by}`.toLowerCase().includes(text)));
  const kinds = [...new Set(site.events.map((each) => each.kind))].sort();
  return [h("div", { class: "head", key: "head" }, h("h1", { tabindex: -1 }, "Events")),
    h("section", { class: "card", key: "events", "aria-label": "Events" }, h("div", { class: "top" },
      h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search events", value: view.data.text || "", oninput: (event) => { view.data.text = event.target.value; draw(); } }),
      h("select", { "aria-label": "Kinds of events", onchange: (event) => { view.data.kind = event.target.value; draw(); } }, [["", "All kinds"], ["bad", "Problems"], ...kinds.map((each) => [each, word(each)])].map(([value, label]) => h("option", { key: value, value, selected: value === kind }, label))),
      h("span", { class: "soft small", role: "status" }, plural(list.length, "event"))), eventList(list, view.limit || 100))];
}
const PROBLEMS = /FAILED|LOST|TAKEN_BACK/;
const isProblem = (each) => PROBLEMS.test(each.kind);
/** List events, the newest first: those of one application, or of all, with a button for more. */
function eventList(list, most, app) {
  if (!list.length) return h("p", { class: "empty" }, "No events.");
  const look = (each) => (isProblem(each) ? "FAILED" : /STARTED|DEPLOYED$|COMPLETED|LOADED/.test(each.kind) ? "DEPLOYED" : /ING$|STEP|SCALED/.test(each.kind) ? "UPDATING" : "");
  return h("ul", { class: "items" }, list.slice(-most).reverse().map((each) => h("li", { key: each.number, class: "event" },
    h("time", { class: "soft small", title: when(each.at), datetime: new Date(1000 * each.at).toISOString() }, clock(each.at)),
    h("span", null, chip(look(each), word(each.kind))),
    h("div", null, h("p", null, firstLines(each.message)), (each.application && app === undefined) || each.by ? h("p", { class: "soft small" }, each.application && app === undefined ? [h("a", { href: to("app", each.application) }, each.application), " "] : null, each.by ? `by ${each.by}` : null) : null))),
    app === undefined && list.length > most ? h("li", { key: "more" }, h("button", { type: "button", onclick: () => { view.limit = most + 200; draw(); } }, "Show more")) : null);
}

function systemPage() {
  const it = part("instance") || {};
  const facts = [["Instance", it.instance], ["Version", site.version], ["Workers", number(it.workers)], ["Addresses", urls()], ["Store", it.owns_store === false ? "held by another cluster" : "held by this instance"], ["Controller", `epoch ${it.epoch}`]];
  if (it.target_capacity != null) facts.push(["Target capacity", `${number(it.target_capacity)} %`]);
  const notes = [...(it.unresponsive_workers || []).map((each) => `Worker ${each} does not answer.`), ...Object.entries(it.refused_workers || {}).map(([name, why]) => `Worker ${name} is refused: ${why}`), ...Object.entries(it.problems || {}).map(([name, why]) => `${name}: ${why}`)];
  return [h("div", { class: "head", key: "head" }, h("h1", { tabindex: -1 }, "System"), h("div", { class: "acts" }, h("a", { class: "button", href: `${ROOT}status` }, "Dask's dashboard"), h("a", { class: "button", href: `${BASE}${encodeURIComponent(site.instance)}/api/serve/applications/` }, "REST API"))),
    notes.length ? h("ul", { class: "items card", key: "notes" }, notes.map((each, index) => h("li", { key: index }, h("p", { class: "note bad" }, each)))) : null,
    card("Instance", {}, null, h("div", { class: "body" }, h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", { key: `t${name}` }, name), h("dd", { key: `d${name}` }, value)])))),
    card("Controller and proxies", {}, null, h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Controller and proxies" }, h("table", { class: "sheet" }, h("thead", null, h("tr", null, ["Name", "State", "Worker", "Process", "Message"].map((each) => h("th", { key: each, scope: "col" }, each)))), h("tbody", null, (it.actors || []).map((each) => h("tr", { key: each.name }, h("td", null, each.kind === "proxy" ? `Proxy ${each.name}` : "Controller"), h("td", null, chip(each.state)), h("td", { class: "whole" }, each.worker || "–"), h("td", null, each.pid == null ? "–" : String(each.pid)), h("td", null, each.message || "")))))))];
}

/** Return the answer to a request for the page that is shown: asked again if the key is another one. */
const AGAIN_MS = 2000;
/** Return whether the same request would fail again; another failure may be over soon. */
const isRefused = (error) => error.status >= 400 && error.status < 500;
function wanted(path, key, everyMs = 0) {
  const known = view.data[path] || (view.data[path] = {});
  const isLate = everyMs && Date.now() - (known.at || 0) > everyMs;
  if ((known.key !== key || isLate) && !known.isAsking && site.link === "on" && Date.now() - (known.at || 0) > (known.isLost ? AGAIN_MS : 500)) {
    known.isAsking = true;
    const data = view.data;
    const done = (more) => Object.assign(known, { key, isLost: false, ...more });
    api(path).then((answer) => done({ answer }), (error) => {
      if (isRefused(error)) done({ answer: { error: error.message } });
      else Object.assign(known, { isLost: true, answer: known.answer || { error: error.message } });
    }).finally(() => {
      Object.assign(known, { isAsking: false, at: Date.now() });
      if (data === view.data) later();
    });
  }
  return known.answer;
}

// ---- The graph of deployments, in layers from the left

function graphPage() {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const apps = site.applications.filter((app) => words.every((one) => `${app.name} ${app.deployments.map((each) => each.name).join(" ")}`.toLowerCase().includes(one)));
  const list = [];
  let left = 0;
  for (const app of apps) if (list.length + app.deployments.length <= 60 || !list.length) list.push(...app.deployments); else left++;
  return [h("div", { class: "head", key: "head" }, h("h1", { tabindex: -1 }, "Graph")),
    h("section", { class: "card", key: "graph", "aria-label": "Graph of deployments" }, h("div", { class: "top" },
      h("input", { type: "search", id: "search", placeholder: "Search applications", "aria-label": "Search applications", value: view.search, oninput: (event) => { view.search = event.target.value; draw(); } }),
      h("span", { class: "soft small", role: "status" }, left ? `${plural(left, "more application")}: search for one to see it` : plural(apps.length, "application"))),
      list.length ? graph(list) : h("p", { class: "empty" }, site.applications.length ? "No application fits." : NOTHING_RUNS)),
    list.length ? card("Calls", {}, null, callTable(list)) : null];
}
function calls() {
  const found = new Map();
  for (const each of (part("live/") || {}).calls || []) found.set(`${each.from}\n${each.to}`, each);
  return found;
}
function edgesOf(list) {
  const known = new Map(list.map((each) => [each.tag, each])), rates = calls(), edges = new Map();
  for (const each of list) for (const name of each.needs) {
    const target = list.find((one) => one.app === each.app && one.name === name);
    if (target) edges.set(`${each.tag}\n${target.tag}`, { from: each.tag, to: target.tag });
  }
  for (const each of list) if (each.is_ingress) edges.set(`\n${each.tag}`, { from: "", to: each.tag });
  for (const [key, each] of rates) if (known.has(each.to) && (each.from === "" || known.has(each.from))) edges.set(key, { ...edges.get(key), ...each });
  return [...edges.values()];
}
function callTable(list) {
  const edges = edgesOf(list);
  if (!edges.length) return h("p", { class: "empty" }, "No deployment is called by another one, or over HTTP.");
  const hasApp = new Set(list.map((each) => each.app)).size > 1;
  const name = (tag) => {
    const it = site.byTag.get(tag);
    return it ? [h("a", { href: toDeployment(it) }, it.name), hasApp ? h("span", { class: "soft small" }, "  ", it.app || "no application") : null] : tag || "HTTP and programs";
  };
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Calls" }, h("table", { class: "sheet" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "From"), h("th", { scope: "col" }, "To"), h("th", { scope: "col", class: "num" }, "Requests/s"), h("th", { scope: "col", class: "num" }, "Errors/s"))), h("tbody", null, edges.map((each) => h("tr", { key: `${each.from}\n${each.to}` }, h("td", null, name(each.from)), h("td", null, name(each.to)), h("td", { class: "num" }, number(each.requests_per_s)), h("td", { class: "num" }, number(each.errors_per_s)))))));
}

const BOX = { width: 208, height: 52, gapX: 104, gapY: 20 };

/** Return the place of each node: its layer is one more than that of its last caller. */
function layout(tags, edges) {
  // Only clients are in the first layer, if there are any.
  const layer = new Map(tags.map((each) => [each, each !== "" && tags.includes("") ? 1 : 0]));
  // At most as often as there are nodes: calls may go round in a circle.
  for (let round = 0; round < Math.min(tags.length, 30); round++) {
    let moved = false;
    for (const { from, to } of edges) if (from !== to && layer.get(to) <= layer.get(from) && layer.get(from) < tags.length) { layer.set(to, layer.get(from) + 1); moved = true; }
    if (!moved) break;
  }
  const layers = [];
  for (const each of tags) (layers[layer.get(each)] ||= []).push(each);
  const rows = layers.filter(Boolean);
  const place = new Map();
  const number = () => rows.forEach((row) => row.forEach((each, index) => place.set(each, index - (row.length - 1) / 2)));
  number();
  for (let round = 0; round < 4; round++) {
    const isDown = round % 2 === 0;
    for (const row of isDown ? rows : [...rows].reverse()) {
      const middle = new Map(row.map((each) => {
        const near = edges.filter((edge) => (isDown ? edge.to : edge.from) === each).map((edge) => place.get(isDown ? edge.from : edge.to));
        return [each, near.length ? near.reduce((sum, one) => sum + one, 0) / near.length : place.get(each)];
      }));
      row.sort((a, b) => middle.get(a) - middle.get(b));
      number();
    }
  }
  const most = Math.max(...rows.map((row) => row.length));
  const found = new Map();
  rows.forEach((row, x) => row.forEach((each, y) => found.set(each, { x: x * (BOX.width + BOX.gapX), y: (y + (most - row.length) / 2) * (BOX.height + BOX.gapY) })));
  return { places: found, width: rows.length * (BOX.width + BOX.gapX) - BOX.gapX, height: most * (BOX.height + BOX.gapY) - BOX.gapY };
}

const ruler = document.createElement("canvas").getContext("2d");
/** Cut the name of a deployment to the room in its box. */
function short(text) {
  ruler.font = `600 13px ${getComputedStyle(document.body).fontFamily}`;
  const isWide = (some) => ruler.measureText(some).width > BOX.width - 40;
  if (!isWide(text.slice(0, 200)) && text.length <= 200) return text;
  let count = 40;
  while (count > 1 && isWide(`${text.slice(0, count)}…`)) count--;
  return `${text.slice(0, count)}…`;
}

let laidOut = { key: "" };
function graph(list) {
  const edges = edgesOf(list);
  const tags = [...(edges.some((each) => each.from === "") ? [""] : []), ...list.map((each) => each.tag)];
  const key = JSON.stringify([tags, edges.map((each) => [each.from, each.to])]);
  if (laidOut.key !== key) laidOut = { key, ...layout(tags, edges) };
  const { places, width, height } = laidOut;
  const look = (each) => (each.errors_per_s > 0.005 ? "failing" : each.requests_per_s > 0.005 ? "on" : "");
  const lines = edges.map((each) => {
    const from = places.get(each.from), to = places.get(each.to);
    const x1 = from.x + BOX.width, y1 = from.y + BOX.height / 2, x2 = to.x - 9, y2 = to.y + BOX.height / 2;
    const isBack = to.x <= from.x, bend = isBack ? BOX.gapX : (x2 - x1) / 2;
    // Nearer to the end, where the lines of one caller are apart.
    const at = isBack ? { x: (x1 + x2) / 2, y: (y1 + y2) / 2 } : { x: x1 + 0.66 * (x2 - x1), y: y1 + 0.8 * (y2 - y1) };
    return { ...each, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, tip: `M${x2 + 8} ${y2}l-9 -5v10z`, ...at, look: look(each) };
  });
  return h("div", { class: "graph", tabindex: 0, role: "group", "aria-label": "Drawing of the graph" }, h("svg", { class: width > 640 && width < 1000 ? "fits" : null, role: "group", "aria-label": `Graph of ${plural(list.length, "deployment")}`, width: width + 4, height: height + 4, viewBox: `-2 -2 ${width + 4} ${height + 4}` },
    lines.map((each) => h("path", { key: `e${each.from}\n${each.to}`, class: `edge ${each.look}`, d: each.d })),
    lines.map((each) => h("path", { key: `t${each.from}\n${each.to}`, class: `tip ${each.look}`, d: each.tip })),
    lines.map((each) => h("text", { key: `r${each.from}\n${each.to}`, class: "rate", x: each.x, y: each.y + 4 }, each.requests_per_s == null ? "" : `${number(each.requests_per_s)}/s`)),
    tags.includes("") ? h("g", { key: "g" }, h("rect", { class: "box", x: places.get("").x, y: places.get("").y, width: BOX.width, height: BOX.height, rx: 26 }), h("text", { class: "name", x: places.get("").x + 24, y: places.get("").y + 31 }, "HTTP and programs")) : null,
    list.map((each) => {
      const { x, y } = places.get(each.tag), now = live(each.tag);
      return h("a", { svg: true, key: `n${each.tag}`, href: toDeployment(each) }, h("title", null, each.name),
        h("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: 8 }),
        h("circle", { class: `dot ${SHORT[each.status] || ""}`, cx: x + 16, cy: y + 20, r: 4.5 }),
        h("text", { class: "name", x: x + 28, y: y + 24 }, short(each.name)),
        h("text", { class: "sub", x: x + 28, y: y + 41 }, SHORT[each.status] === "good" ? `${each.running ?? 0}/${each.wanted ?? 0} · ${number(now.requests_per_s)}/s · p99 ${seconds(now.latency_p99_s)}` : `${word(each.status)} · ${each.running ?? 0}/${each.wanted ?? 0}`));
    })));
}

// ---- Logs

function logsPage() {
  const data = view.data, query = view.query;
  const filter = (name) => query.get(name) || "";
  const apps = site.applications.map((each) => each.name).sort();
  const app = site.applications.find((each) => each.name === filter("application"));
  const deployments = app ? app.deployments.filter((each) => !each.actor_of).map((each) => each.name).sort() : [];
  const deployment = app && app.deployments.find((each) => each.name === filter("deployment"));
  const change = (name, value) => {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value); else next.delete(name);
    if (name === "application") next.delete("deployment");
    if (name !== "replica" && name !== "level" && name !== "grep") next.delete("replica");
    history.replaceState(null, "", `${to("logs")}?${next}`);
    follow();
  };
  const pick = (name, label, values, all) => h("select", { key: name, "aria-label": label, onchange: (event) => change(name, event.target.value) }, [["", all], ...values].map(([value, text]) => h("option", { key: value, value, selected: value === filter(name) }, text)));
  readLogs(query.toString());
  const lines = data.lines || [];
  return [h("div", { class: "head", key: "head" }, h("h1", { tabindex: -1 }, "Logs")),
    h("section", { class: "card", key: "logs", "aria-label": "Logs" }, h("div", { class: "top" },
      pick("application", "Application", apps.map((each) => [each, each]), "All applications"),
      deployments.length ? pick("deployment", "Deployment", deployments.map((each) => [each, each]), "All deployments") : null,
      deployment ? pick("replica", "Replica", [...new Set([...deployment.replicas.map((each) => each.id), ...(filter("replica") ? [filter("replica")] : [])])].map((each) => [each, shortId(each)]), "All replicas") : null,
      pick("level", "Level", [["WARNING", "Warnings and errors"], ["ERROR", "Errors"], ["DEBUG", "Debug and more"]], "All levels"),
      h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search the logs", value: filter("grep"), onchange: (event) => change("grep", event.target.value) }),
      filter("replica") ? [h("button", { type: "button", key: "profile", onclick: () => profile({ id: filter("replica") }) }, "Profile"), h("button", { type: "button", key: "stacks", onclick: () => stacks({ id: filter("replica") }) }, "Stacks")] : null,
      h("button", { type: "button", key: "hold", "aria-pressed": String(!data.isHeld), onclick: () => { data.isHeld = !data.isHeld; draw(); } }, data.isHeld ? "Follow" : "Hold")),
      Object.entries(data.missing || {}).map(([worker, why]) => h("p", { class: "note warn", key: `m${worker}` }, `Worker ${worker}: ${why}`)),
      data.trouble && lines.length ? h("p", { class: "note warn", key: "trouble" }, data.trouble) : null,
      !lines.length ? h("p", { class: "empty", key: "none" }, data.trouble || (data.asked ? "No log lines yet." : "Asking the workers.")) :
        h("ul", { class: "logs", id: "logs", tabindex: 0, "aria-label": "Log lines" }, lines.map((each) => h("li", { key: each.$n }, h("time", { class: "soft", title: when(each.time) }, clock(each.time)), h("span", { class: { ERROR: "bad", CRITICAL: "bad", WARNING: "warn" }[each.level] || "soft" }, each.level), h("span", { class: "soft cut", title: each.replica || "" }, [each.deployment, each.replica && shortId(each.replica)].filter(Boolean).join(" ") || each.logger || ""), h("span", null, each.message, each.exception ? `\n${each.exception}` : "")))))];
}

function readLogs(query) {
  const data = view.data;
  if (data.query !== query) Object.assign(data, { query, lines: [], cursor: null, asked: false, isAsking: false, isRefused: false, trouble: "" });
  if (data.isAsking || data.isHeld || data.isRefused || site.link !== "on" || Date.now() - (data.at || 0) < (data.trouble ? AGAIN_MS : 900)) return;
  data.isAsking = true;
  const params = new URLSearchParams(query);
  params.set("limit", "500");
  if (data.cursor != null) params.set("after", data.cursor);
  const isCurrent = () => data === view.data && data.query === query;
  api(`serve/logs?${params}`).then((answer) => {
    if (!isCurrent()) return;
    const added = answer.records || [];
    data.count = (data.count || 0);
    for (const each of added) each.$n = data.count++;
    data.lines = data.lines.concat(added).slice(-2000);
    data.cursor = answer.next ?? data.cursor;
    data.asked = true;
    data.missing = answer.missing || {};
    const box = $("logs");
    const isAtEnd = !box || box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (added.length || data.trouble) { data.trouble = ""; draw(); }
    if (isAtEnd && added.length && $("logs")) $("logs").scrollTop = $("logs").scrollHeight;
  }, (error) => { if (isCurrent()) data.isRefused = isRefused(error) && !error.message.includes("nstance"), data.trouble = error.status === 404 && !error.message.includes("nstance") ? "This version of daskserve has no logs here." : error.message; }).finally(() => { if (isCurrent()) Object.assign(data, { isAsking: false, at: Date.now() }); });
}

// ---- Actions, each after a confirmation

const action = (text, act) => h("button", { type: "button", key: text, disabled: site.link !== "on", onclick: act }, text);

/** Open the dialog; return whether it is still open for this. */
let opened = 0;
function openDialog(look = "") {
  const mine = ++opened, dialog = $("dialog");
  dialog.className = look;
  if (!dialog.open) dialog.showModal();
  return () => dialog.open && mine === opened;
}

/** Show a dialog; `act` gets its form, and its error is shown in the dialog. */
function confirmed({ title, text, button, isDanger, fields = [], act, done }) {
  const dialog = $("dialog");
  let trouble = "", isBusy = false;
  const show = () => render(dialog, h("form", { method: "dialog", key: title, onsubmit: submit }, h("h2", { id: "dialog-title" }, title), text ? h("p", null, text) : null, fields.length ? h("div", { once: true }, fields) : null, h("div", { role: "alert" }, trouble ? h("p", { class: "note bad" }, trouble) : null),
    h("div", { class: "acts" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", { class: isDanger ? "danger" : "main", type: "submit", disabled: isBusy }, isBusy ? "Asking" : button))));
  async function submit(event) {
    event.preventDefault();
    if (isBusy) return;
    isBusy = true;
    trouble = "";
    show();
    try {
      const answer = await act(new FormData(event.target));
      if (isOpen()) dialog.close();
      toast(typeof done === "function" ? done(answer) : done);
    } catch (error) {
      trouble = error.message || "It failed.";
      if (!isOpen()) toast(`${title} ${trouble}`);
    }
    isBusy = false;
    if (isOpen()) show();
  }
  render(dialog);
  show();
  const isOpen = openDialog();
}
const post = (path, body) => api(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

function scale(each) {
  confirmed({ title: `Scale ${each.name}`, text: `It has ${plural(each.wanted, "replica")}. The number lasts until the deployment is deployed again.`, button: "Scale", done: (answer) => answer.message,
    fields: [h("div", { class: "field" }, h("label", { for: "replicas" }, "Number of replicas"), h("input", { id: "replicas", name: "number", type: "number", min: 0, max: 100000, step: 1, required: true, value: each.wanted }))],
    act: (form) => post(`${deploymentPath(each)}/num_replicas`, { target_num_replicas: Number(form.get("number")) }) });
}
async function rollBack(app) {
  let revisions;
  try {
    revisions = (await api(`serve/applications/${encodeURIComponent(app.name)}/history`)).revisions.reverse();
  } catch (error) {
    toast(error.message);
    return;
  }
  // While a change is under way, the one that ran before it is the first to which to return.
  const isChanging = revisions.some((each) => each.state === "DEPLOYING");
  const able = revisions.filter((each) => each.can_return && each.state !== "DEPLOYING" && (isChanging || each.state !== "RUNNING"));
  if (!able.length) { confirmed({ title: `Roll back ${app.name}`, text: "There is no earlier revision to which it can go back.", button: "Close", act: async () => {}, done: "Nothing was changed." }); return; }
  confirmed({ title: `Roll back ${app.name}?`, text: "The revision that you choose is deployed again, as a new one.", button: "Roll back", isDanger: true, done: `${app.name} rolls back.`,
    fields: [h("fieldset", { class: "options" }, h("legend", { class: "hidden" }, "Revision"), able.slice(0, 50).map((each, index) => h("label", { key: each.number }, h("input", { type: "radio", name: "revision", value: each.number, checked: index === 0, required: true }), h("div", null, revisionText(each, null)))))],
    act: (form) => post(`serve/applications/${encodeURIComponent(app.name)}/rollback`, { revision: Number(form.get("revision")) }) });
}
function rolloutAction(each, verb, text) {
  const what = { pause: "It stays at its step until it is promoted or aborted; its gates stay in force.", promote: "It goes on to its next step at once, whatever it waits for.", abort: "The old version gets all traffic, and the change is rolled back." }[verb];
  return action(text, () => confirmed({ title: `${text} the rollout of ${each.name}?`, text: what, button: text, isDanger: verb === "abort", done: `Done: ${text.toLowerCase()} the rollout of ${each.name}.`, act: () => api(`${deploymentPath(each)}/rollout/${verb}`, { method: "POST" }) }));
}

// ---- Inside a replica

async function inspect(each, title, path, body, patience = ANSWER_MS) {
  const dialog = $("dialog");
  const show = (content) => render(dialog, h("form", { method: "dialog", key: title }, h("h2", { id: "dialog-title" }, title), content, h("div", { class: "acts" }, h("button", { type: "submit" }, "Close"))));
  show(h("p", { class: "soft", role: "status" }, "Asking the replica. A profile takes five seconds."));
  const isOpen = openDialog("wide");
  try {
    const answer = await api(`serve/replicas/${encodeURIComponent(each.id)}/${path}`, { patience });
    if (isOpen()) show(body(answer, show));
  } catch (error) {
    if (isOpen()) show(h("p", { class: "note bad", role: "alert" }, error.status === 404 && !error.message.includes("eplica") ? "This version of daskserve has no profiles here." : error.message));
  }
}
const profile = (each) => inspect(each, `Profile of ${shortId(each.id)}`, "profile?seconds=5", (answer, show) => flame(answer, show, each));
const memory = (each) => inspect(each, `Memory of ${shortId(each.id)}`, "profile?seconds=5&memory=true", (answer) => memoryOf(answer.memory, each), 3 * ANSWER_MS);
const stacks = (each) => inspect(each, `Stacks of ${shortId(each.id)}`, "stacks", (answer) => h("pre", { tabindex: 0, "aria-label": "Stacks" }, stacksText(answer)));
const frameOf = (each) => `  ${each.function}  ${each.file}:${each.line}${each.text ? `\n      ${each.text}` : ""}`;
function stacksText(answer) {
  const parts = [...(answer.threads || []).map((each) => ["Thread", each]), ...(answer.tasks || []).map((each) => ["Task", each])];
  const isBusy = ([, each]) => each.frames.some((frame) => frame.is_users);
  const texts = [...parts.filter(isBusy), ...parts.filter((each) => !isBusy(each))].map(([kind, each]) => `${kind} ${each.name}\n${each.frames.map(frameOf).join("\n")}`);
  // A child process that does not answer has only these.
  if (answer.note) texts.push([answer.note, (answer.native || "").trimEnd()].filter(Boolean).join("\n"));
  if (answer.more_tasks) texts.push(`... and ${plural(answer.more_tasks, "more task")}.`);
  return texts.join("\n\n") || "No thread runs code.";
}

/**
 * Return the tree of a profile's stacks: each has the numbers of its functions, the outermost first, and how often it
 * was seen, and was on a processor.
 */
function treeOf(answer, isRunning) {
  const root = { name: "all", count: 0, ran: 0, kids: new Map() };
  for (const [numbers, seen, ran] of answer.stacks || []) {
    const count = isRunning ? ran : seen;
    if (!count) continue;
    root.count += count;
    root.ran += ran;
    let node = root;
    for (const each of numbers) {
      const [name, file, line] = answer.functions[each];
      if (!node.kids.has(each)) node.kids.set(each, { name, place: `${file}:${line}`, count: 0, ran: 0, kids: new Map(), parent: node });
      node = node.kids.get(each);
      node.count += count;
      node.ran += ran;
    }
  }
  return root;
}
/** Show a profile: all of the time, or that on a processor, because a thread that waits would hide what works. */
function flame(answer, show, each, isRunning = false) {
  const pick = (text, value) => h("button", { type: "button", key: text, "aria-pressed": String(value === isRunning), onclick: () => show(flame(answer, show, each, value)) }, text);
  const draw = (root) => [h("div", { class: "choices", role: "group", "aria-label": "What is shown", key: "time" }, pick("All time", false), pick("On a processor", true), h("button", { type: "button", key: "memory", "aria-pressed": "false", onclick: () => memory(each) }, "Memory")), flameOf(root, (one) => show(draw(one)))];
  return draw(treeOf(answer, isRunning));
}
function flameOf(root, go) {
  if (!root.count) return h("p", { class: "soft", key: "none" }, "The replica ran no code of its user during these seconds.");
  const boxes = [];
  const place = (node, x, depth) => {
    const share = node.count / root.count;
    if (share < 0.004 || depth > 80) return;
    let own = node.count, start = x;
    for (const each of node.kids.values()) own -= each.count;
    const text = `${node.name}, ${number(Math.round(1000 * share) / 10)} %`;
    boxes.push(h("button", { type: "button", key: `${depth} ${x}`, title: `${text} ${node.place || ""}`, class: `${own > 0.05 * root.count ? "own" : ""} ${node.ran < node.count / 2 ? "waits" : ""}`, style: { left: `${100 * x}%`, width: `${100 * share}%`, top: `${21 * depth}px` }, onclick: () => go(node === root ? node.parent || root : node) }, text));
    for (const each of [...node.kids.values()].sort((one, two) => two.count - one.count)) { place(each, start, depth + 1); start += each.count / root.count; }
  };
  place(root, 0, 0);
  const depth = boxes.reduce((most, each) => Math.max(most, parseFloat(each.props.style.top)), 0);
  return [h("p", { class: "soft small" }, "Wider is more time; blue is time that waits. Choose a frame to see it alone, and the first one to go back."), h("div", { class: "flame", style: { height: `${depth + 22}px` } }, boxes)];
}

/** Show the lines of code that hold memory. */
function memoryOf(answer, each) {
  const known = answer.was_on ? "" : " Python did not trace its memory before (PYTHONTRACEMALLOC=1 in the replica's environment would), so only what these seconds allocated is known.";
  const file = (path) => path.split("/").slice(-3).join("/");
  return [h("div", { class: "choices", role: "group", "aria-label": "What is shown", key: "time" }, h("button", { type: "button", key: "time", "aria-pressed": "false", onclick: () => profile(each) }, "Time"), h("button", { type: "button", key: "memory", "aria-pressed": "true", onclick: () => memory(each) }, "Memory")),
    h("p", { class: "soft small", key: "all" }, answer.was_ended ? "Other code has ended the tracing of memory meanwhile." : `${bytes(answer.traced_bytes)} in Python's objects, ${bytes(answer.peak_bytes)} at most.${known}`),
    answer.lines.length ? h("div", { class: "scroll", key: "lines", tabindex: 0, role: "group", "aria-label": "Lines of code" }, h("table", { class: "sheet" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Line"), ["Size", "Change", "Blocks"].map((one) => h("th", { key: one, scope: "col", class: "num" }, one)))), h("tbody", null, answer.lines.map(([path, line, size, count, change]) => h("tr", { key: `${path}:${line}` }, h("td", { class: "mono", title: path }, `${file(path)}:${line}`), [bytes(size), bytes(change), number(count)].map((one, at) => h("td", { key: at, class: "num" }, one))))))) : null];
}

// ---- Start

addEventListener("keydown", (event) => {
  if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && $("search") && !$("dialog").open) { event.preventDefault(); $("search").focus(); }
});
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
follow();
connect();
