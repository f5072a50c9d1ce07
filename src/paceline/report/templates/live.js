// Shows runs while they train, by the events that `paceline dashboard` sends. Text of runs is set as text, never as HTML.
"use strict";
(() => {
  const words = JSON.parse(document.getElementById("words").textContent);
  const MANY = 12; // ranks, from which on their rows are compact
  history.replaceState(null, "", location.pathname); // the token is in the cookie now, and not in the history

  const make = (tag, className = "", text = "") => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== "") node.textContent = text;
    return node;
  };
  const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const sized = (parent, tag, count) => { // as many children, those that are there kept
    while (parent.children.length > count) parent.lastChild.remove();
    while (parent.children.length < count) parent.append(make(tag));
    return [...parent.children];
  };
  const grouped = (number) => number.toLocaleString("en-US");
  const short = (value) => value && Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(3));
  const trained = ({ step, total }) => total ? `${Math.min(Math.floor(100 * step / total), 100)} % trained` : "training";
  const clock = (s) => {
    const [hours, minutes, rest] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, String(Math.floor(s) % 60).padStart(2, "0")];
    return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
  };
  const figure = (node, text) => { // "3,320 samples/s": the unit is smaller
    const [, value, unit] = /^(\S+)(.*)$/.exec(text || "–");
    node.replaceChildren(value, ...(unit ? [make("span", "unit", unit)] : []));
  };
  const stack = (node, shares, colours, titles) => { // shares in tenths of a percent
    sized(node, "i", shares.length).forEach((part, number) => {
      part.style.width = shares[number] / 10 + "%";
      if (part.style.backgroundColor === "") part.style.backgroundColor = colours[number % colours.length];
      if (titles) part.title = titles[number];
    });
  };

  // Losses over steps, drawn by the server, which escapes the names in it. No other HTML is taken.
  const showCurve = (node, { drawn, label }) => {
    node.parentNode.querySelector(".not-yet").hidden = drawn !== "";
    node.setAttribute("aria-label", label);
    node.innerHTML = drawn;
  };

  // One run's part of the page: each section of its state has a function that shows it
  class RunView {
    constructor(number) {
      this.state = {};
      this.node = document.getElementById("run-template").content.firstElementChild.cloneNode(true);
      this.node.id = `run-${number}`;
      this.colour = words.series[number % words.series.length];
      this.node.style.setProperty("--run", this.colour);
      this.fields = Object.fromEntries([...this.node.querySelectorAll("[data-f]")].map((node) => [node.dataset.f, node]));
      this.sections = Object.fromEntries([...this.node.querySelectorAll("[data-s]")].map((node) => [node.dataset.s, node]));
      this.cards = Object.fromEntries([...this.node.querySelectorAll("[data-card]")].map((node) => [node.dataset.card, node]));
      for (const [, name, colour, text] of words.parts) {
        const entry = make("span"), mark = make("i");
        mark.style.background = colour;
        entry.title = text;
        entry.append(mark, name);
        this.node.querySelector(".legend").append(entry, " ");
      }
      this.node.querySelector(".swatch").style.background = this.colour;
      this.compared = make("li");
      const only = this.node.querySelector("[data-s=events] input");
      only.addEventListener("change", () => this.node.querySelector(".log").classList.toggle("failures", only.checked));
      const bar = make("div", "bar");
      bar.append(make("div"));
      this.compared.append(make("i", "swatch"), make("a"), bar, make("span"), make("span"), make("span"));
      this.compared.firstChild.style.background = this.colour;
      this.compared.children[1].href = `#run-${number}`;
    }

    take(sections) {
      Object.assign(this.state, sections);
      const problem = this.state.problem || "";
      this.fields.problem.hidden = !problem;
      say(this.fields.problem, problem);
      say(this.fields.name, this.state.name);
      for (const [name, section] of Object.entries(sections)) if (section && this[name]) this[name](section);
    }

    head(head) {
      for (const name of ["plan", "machine"]) say(this.fields[name], head[name]);
      say(this.fields.job, `job ${head.job} · global batch ${head.batch}`);
      say(this.compared.children[1], `${this.state.name} · ${head.plan}`);
    }

    progress(now) {
      for (const node of [this.node, this.fields.phase, this.compared]) node.dataset.phase = now.phase;
      say(this.fields.phase, { running: "running", late: "no steps", ended: "ended", starting: "starting" }[now.phase]);
      say(this.fields.state, now.phase === "running" ? (now.slow ? `slow: ${now.slow}` : "") : now.state);
      const share = now.total ? Math.min(100 * now.step / now.total, 100) : 0;
      for (const bar of [this.node.querySelector(".bar"), this.compared.children[2]]) {
        bar.firstElementChild.style.width = share + "%";
        bar.setAttribute("aria-valuenow", now.step);
        if (now.total) bar.setAttribute("aria-valuemax", now.total);
      }
      const epoch = now.epoch ? `epoch ${grouped(now.epoch)} · ` : "";
      say(this.fields.steps, `${epoch}step ${grouped(now.step)}${now.total ? ` of ${grouped(now.total)}` : ""}`);
      say(this.fields.left, now.left && now.phase !== "ended" ? `${now.left} left` : "");
      for (const name of ["loss", "speed", "step_time"]) figure(this.cards[name].querySelector(".value"), now[name]);
      const [metric] = now.metrics.filter(([name]) => name !== "loss").concat(now.metrics);
      this.cards.metric.hidden = !metric;
      if (metric) { say(this.cards.metric.querySelector(".name"), metric[0]); figure(this.cards.metric.querySelector(".value"), metric[1]); }
      say(this.compared.children[3], now.loss ? `loss ${now.loss}` : "");
      say(this.compared.children[4], now.speed || "");
      this.tick();
    }

    tick() { // time goes on between the events
      const { began } = this.state.head || {}, { ended } = this.state.progress || {};
      say(this.fields.elapsed, began ? `for ${clock(Math.max((ended || Date.now() / 1000 + ahead) - began, 0))}` : "");
    }

    curve(curve) { showCurve(this.sections.curve.querySelector(".curve"), curve); }

    ranks(ranks) {
      this.sections.ranks.hidden = !ranks.length;
      const list = this.node.querySelector(".ranks"), colours = words.parts.map(([, , colour]) => colour);
      list.classList.toggle("many", ranks.length > MANY);
      sized(list, "div", ranks.length).forEach((row, number) => {
        const [rank, step, behind, time, parts] = ranks[number];
        if (!row.children.length) { row.className = "rank"; row.append(make("span", "who"), make("div", "stack"), make("span", "time")); row.children[1].setAttribute("role", "img"); }
        row.classList.toggle("loud", behind > 0);
        say(row.children[0], ranks.length > MANY ? String(rank) : `rank ${rank}`);
        say(row.children[2], time);
        const told = parts.map((share, part) => `${words.parts[part][1]} ${share / 10} %`).filter((_, part) => parts[part] > 4).join(", ");
        const label = `rank ${rank}, step ${grouped(step)}${behind > 0 ? `, ${grouped(behind)} steps behind` : ""}: ${told}`;
        row.title = label;
        row.children[1].setAttribute("aria-label", label);
        stack(row.children[1], parts, colours);
      });
      sized(this.node.querySelector(".of-ranks tbody"), "tr", ranks.length).forEach((row, number) => {
        const [rank, step, behind, time, , samples, share, memory, sent] = ranks[number];
        const cells = [String(rank), grouped(step) + (behind > 0 ? ` (−${grouped(behind)})` : ""), time, grouped(samples), share, memory, sent];
        sized(row, "td", cells.length).forEach((cell, at) => say(cell, cells[at]));
      });
      this.shares(ranks);
    }

    shares(ranks) {
      const bar = this.node.querySelector(".shares"), told = ranks.map(([rank, , , , , samples, share]) => `rank ${rank}: ${grouped(samples)} samples, ${share}`);
      const shares = ranks.map((row) => row[9]), whole = shares.reduce((sum, share) => sum + share, 0);
      bar.hidden = ranks.length < 2 || !whole;
      stack(bar, shares.map((share) => 1000 * share / Math.max(whole, 1)), [this.colour], told);
      bar.setAttribute("aria-label", `Shares of the batch. ${told.join("; ")}`);
      const samples = ranks.filter((row) => row[9]).map((row) => row[5]), least = Math.min(...samples), most = Math.max(...samples);
      const each = least === most ? `each rank gets ${grouped(least)} samples of a batch` : `the ranks get ${grouped(least)} to ${grouped(most)} samples of a batch`;
      say(this.fields.shares, bar.hidden ? "" : `Shares of the batch: ${each}.`);
    }

    steps({ said }) { say(this.fields.said, said); }

    members(members) {
      figure(this.cards.members.querySelector(".value"), `${members.in} of ${members.of}`);
      say(this.cards.members.querySelector(".small"), members.generation ? `generation ${members.generation + 1}` : "");
      say(this.fields.members, `${members.in} of ${members.of} ranks take part${members.generation ? `; they have met again ${members.generation === 1 ? "once" : members.generation + " times"}` : ""}.`);
      const away = [];
      sized(this.node.querySelector(".hosts"), "div", members.hosts.length).forEach((row, number) => {
        const [host, ranks] = members.hosts[number];
        row.className = "host";
        const [name, ...chips] = sized(row, "span", ranks.length + 1);
        if (name.tagName !== "B") row.replaceChild(make("b", "", host), name); else say(name, host);
        chips.forEach((chip, at) => {
          const [rank, state, text, slow] = ranks[at], about = `rank ${rank}: ${text}${slow ? ", slower than the others" : ""}`;
          chip.className = slow ? "chip slow" : "chip";
          chip.dataset.state = state;
          chip.title = about;
          chip.setAttribute("aria-label", about);
          chip.setAttribute("role", "img");
          say(chip, String(rank));
          if (state !== "in" && state !== "starts" || slow) away.push(about);
        });
      });
      const list = this.node.querySelector(".away"), shown = away.length > 8 ? [...away.slice(0, 8), `and ${away.length - 8} more`] : away;
      sized(list, "li", shown.length).forEach((entry, at) => say(entry, shown[at]));
    }

    links({ transport, rows }) {
      this.sections.links.hidden = !rows.length;
      say(this.fields.transport, transport ? `The ranks communicate over ${transport}.` : "");
      const table = this.node.querySelector(".of-links"), used = [0, 1, 2, 3, 4, 5].map((column) => column === 0 || rows.some((row) => row[column]));
      [...table.tHead.rows[0].cells].forEach((cell, column) => { cell.hidden = !used[column]; });
      sized(table.tBodies[0], "tr", rows.length).forEach((row, number) => {
        sized(row, "td", 6).forEach((cell, column) => { say(cell, rows[number][column]); cell.hidden = !used[column]; });
      });
    }

    goodput({ share, said, parts }) {
      this.sections.goodput.hidden = false;
      figure(this.cards.goodput.querySelector(".value"), share);
      say(this.compared.children[5], `goodput ${share}`);
      say(this.fields.goodput, said);
      const bar = this.node.querySelector(".wall"), colours = parts.map(([part]) => words.wall[part]);
      bar.replaceChildren();
      stack(bar, parts.map((part) => part[3]), colours);
      bar.setAttribute("aria-label", said);
      this.node.querySelector(".wall-legend").replaceChildren(...parts.map(([, name, time], at) => {
        const entry = make("span"), mark = make("i");
        mark.style.background = colours[at];
        entry.append(mark, `${name} ${time}`);
        return entry;
      }));
    }

    events({ count, told }) { // the newest first; those that are there stay, so that a reader's place does
      const list = this.node.querySelector(".log"), there = new Map([...list.children].map((entry) => [Number(entry.dataset.number), entry]));
      const entries = told.map(([number, time, text, trouble]) => {
        if (there.has(number)) return there.get(number);
        const entry = make("li", trouble ? "trouble" : ""), said = make("span", "text");
        entry.dataset.number = number;
        if (trouble) said.append(make("span", "badge loud", "attention"), " ");
        said.append(text);
        entry.append(make("time", "", time), said);
        return entry;
      });
      list.replaceChildren(...entries.reverse());
      const failures = told.filter((event) => event[3]).length, label = this.node.querySelector("label");
      label.hidden = !failures;
      say(label.querySelector("span"), `only the ${failures} that need${failures === 1 ? "s" : ""} attention`);
      const left = count - told.length;
      say(this.fields.earlier, !count ? "No events yet." : left ? `${grouped(left)} earlier events are in events.jsonl.` : "");
    }
  }

  const runs = new Map();
  let ahead = 0; // seconds by which the server's clock is ahead
  const body = document.body;
  const take = (changed, compared) => {
    for (const [number, sections] of Object.entries(changed)) {
      if (!runs.has(number)) {
        const view = new RunView(Number(number));
        runs.set(number, view);
        document.getElementById("runs").append(view.node);
        document.getElementById("compare-runs").append(view.compared);
      }
      runs.get(number).take(sections);
    }
    const several = runs.size > 1, views = [...runs.values()];
    body.classList.toggle("several", several);
    document.getElementById("compare").hidden = !several;
    if (several) {
      for (const view of views) view.node.querySelector(".swatch").hidden = false;
      if (compared) showCurve(document.getElementById("compare-curve"), compared);
    }
    const states = views.map((view) => view.state.progress?.phase), training = states.filter((phase) => phase === "running").length;
    const { name, progress } = views[0].state;
    const verdict = several ? `${training} of ${runs.size} runs are training`
      : progress ? `${name}: ${progress.phase === "running" ? trained(progress) : progress.state}` : "This run cannot be shown";
    say(document.getElementById("verdict"), verdict);
    document.title = `${verdict} · paceline`;
  };

  let source = null;
  const connected = (yes, text) => {
    body.classList.toggle("connected", yes);
    say(document.getElementById("connection"), text);
  };
  const connect = () => {
    source = new EventSource("events");
    source.addEventListener("state", (event) => {
      const state = JSON.parse(event.data);
      ahead = state.now - Date.now() / 1000;
      connected(true, "live");
      for (const view of runs.values()) view.state = {};
      take({ ...state.runs }, state.compared);
    });
    source.addEventListener("changes", (event) => { const { runs: changed, compared } = JSON.parse(event.data); take(changed, compared); });
    source.addEventListener("error", () => {
      const closed = source.readyState === EventSource.CLOSED;
      connected(false, closed ? "The server was started again, or has enough readers: open the address that it prints." : "The server does not answer; trying again.");
    });
  };
  document.addEventListener("visibilitychange", () => { // runs are read only while somebody looks
    source.close();
    if (document.hidden) connected(false, "paused while the page is hidden"); else connect();
  });
  setInterval(() => { for (const view of runs.values()) view.tick(); }, 1000);
  connect();
})();
