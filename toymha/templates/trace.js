"use strict";
// Walks through the steps of trace.html and colours its tokens by attention. What is shown stands in the page already,
// but for the weights, which come from the JSON in its element `data`. Columns are tokens, counted from data.begin on.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const MOVES = {ArrowLeft: i => i - 1, ArrowRight: i => i + 1, Home: () => 0, End: () => data.steps.length - 1};
  const DARK = 150; // entries of the palette from here on are so dark that letters on them are white

  const tokens = all(".strip [data-at]"), links = all(".strip a"), articles = all(".step");
  const select = find(".walk select"), readout = find(".readout"), panel = find(".read-heads");
  const N = tokens.length, R = data.names.length;
  const palette = data.colours.match(/.{6}/g).map(text => `#${text}`);
  const labels = tokens.map((token, i) => `“${token.textContent}” (${data.begin + i})`);
  let step = 0, row = 0, now; // now: entries of the palette, row by row, with `across` of them a row, `rows` rows

  // A byte is the square root of a weight in units of 1 / 255.
  function unpack({start, query, rows}) {
    const bytes = Uint8Array.from(atob(rows), letter => letter.charCodeAt(0)), across = query + 1 - start;
    return {bytes, start, query, across, rows: bytes.length / across};
  }

  const hidden = i => i < now.start ? "out of sight" : "hidden, it comes later";
  const entry = (r, i) => i < now.start || i > now.query || r >= now.rows ? null : now.bytes[r * now.across + i - now.start];
  const weight = byte => { const w = (byte / 255) ** 2; return w.toFixed(w < 0.1 ? 3 : 2); };
  const said = (r, i) => {
    const byte = entry(r, i);
    return `${labels[i]}: ${byte === null ? i < now.start || i > now.query ? hidden(i) : "not kept" : weight(byte)}`;
  };

  function colour() {
    const r = row < now.rows ? row : 0;
    tokens.forEach((token, i) => {
      const byte = entry(r, i), chosen = i === now.query + 1;
      token.classList.toggle("hides", !chosen && (i < now.start || i > now.query));
      token.classList.toggle("query", i === now.query);
      token.classList.toggle("dark", byte !== null && byte >= DARK);
      token.style.background = byte === null ? "" : palette[byte];
      token.title = chosen ? `${labels[i]}: chosen in this step` : now.rows ? said(r, i) : labels[i];
    });
    readout.textContent = row < now.rows || !now.rows ? "" : `${data.names[row]} is kept for earlier steps only: the mean is shown.`;
    if (select) select.value = String(r);
    if (panel) all(".names span", panel).forEach((name, i) => name.classList.toggle("at", i === r));
  }

  function paint() {
    const canvas = find("canvas", panel), context = canvas.getContext("2d");
    canvas.width = N;
    canvas.height = R;
    for (let r = 0; r < now.rows; r++) {
      for (let i = now.start; i <= now.query; i++) {
        context.fillStyle = palette[entry(r, i)];
        context.fillRect(i, r, 1, 1);
      }
    }
  }

  function go(to, focus) {
    step = Math.max(0, Math.min(data.steps.length - 1, to));
    now = unpack(data.steps[step]);
    articles.forEach((article, i) => { article.hidden = i !== step; });
    links.forEach((link, i) => {
      link.tabIndex = i === step ? 0 : -1;
      if (i === step) link.setAttribute("aria-current", "step");
      else link.removeAttribute("aria-current");
    });
    find("#place").textContent = `Step ${step} / ${data.steps.length - 1}`;
    if (focus) links[step].focus();
    colour();
    if (!panel) return;
    panel.hidden = !now.rows;
    leave();
    if (!now.rows) return;
    paint();
    const room = find(".room", panel);
    room.scrollLeft = (now.query + 2) / N * room.scrollWidth - room.clientWidth; // the newest tokens are in view
  }

  function choose(r) {
    row = r;
    colour();
  }

  // The cells of every head

  let cell = [0, 0];

  function show(r, i) {
    cell = [Math.max(0, Math.min(R - 1, r)), Math.max(0, Math.min(N - 1, i))];
    const cursor = find(".cursor", panel);
    cursor.hidden = false;
    cursor.style.setProperty("--row", cell[0]);
    cursor.style.setProperty("--column", cell[1]);
    find(".readout", panel).textContent = `${data.names[cell[0]]}, ${labels[now.query]} → ${said(cell[0], cell[1])}`;
  }

  function leave() {
    find(".cursor", panel).hidden = true;
    find(".readout", panel).textContent = "";
  }

  function heads() {
    const map = find(".map", panel);
    panel.style.setProperty("--tokens", N);
    panel.style.setProperty("--rows", R);
    data.names.forEach((name, i) => {
      for (const made of [find(".names", panel).appendChild(document.createElement("span")),
        select.appendChild(document.createElement("option"))]) made.textContent = name;
      select.lastChild.value = String(i);
      find(".names", panel).lastChild.classList.toggle("mean", !name.startsWith("L"));
      find(".names", panel).lastChild.addEventListener("click", () => choose(i));
    });
    select.addEventListener("change", () => choose(Number(select.value)));
    const point = event => {
      const box = map.getBoundingClientRect();
      const at = [(event.clientY - box.top) / box.height * R, (event.clientX - box.left) / box.width * N];
      show(Math.floor(at[0]), Math.floor(at[1]));
    };
    map.addEventListener("pointermove", point);
    map.addEventListener("pointerdown", point);
    map.addEventListener("click", () => choose(cell[0]));
    map.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") leave(); });
    map.addEventListener("focus", () => { if (map.matches(":focus-visible")) show(cell[0], cell[1]); });
    map.addEventListener("keydown", event => {
      const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (event.key === "Escape") return leave();
      if (event.key === "Enter") return choose(cell[0]);
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      show(cell[0] + move[0], cell[1] + move[1]);
    });
  }

  if (panel) heads();
  links.forEach((link, i) => link.addEventListener("click", event => { event.preventDefault(); go(i, true); }));
  find(".strip").addEventListener("keydown", event => {
    const move = MOVES[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(move(step), true);
  });
  for (const button of all(".walk button")) button.addEventListener("click", () => go(step + Number(button.dataset.step)));
  for (const later of all(".walk, .cells-key, .readout")) later.hidden = false;
  const asked = () => { const found = /^#step(\d+)$/.exec(location.hash); return found ? Number(found[1]) : 0; };
  addEventListener("hashchange", () => go(asked()));
  go(asked());
})();
