"use strict";
// Draws the maps and the lines of heads.html from the JSON in its element `data`. Tokens are put in as text, never
// as HTML. T tokens; a pattern is an array of T * T weights, row by row: a row is a query, a column a key.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const STEPS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  const FAINTEST = 0.02; // weight of a line that is drawn

  function add(parent, text, name) {
    const made = parent.appendChild(document.createElement("span"));
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  // Pointing at a cell of a grid: by mouse, by finger, by arrow keys. `place` says where in the grid an event is, from
  // 0 to 1 in each direction; `show` gets a row and a column, `leave` nothing.
  function explore(area, rows, columns, place, show, leave) {
    let at = [0, 0];
    const go = (row, column) => {
      at = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
      show(at[0], at[1]);
    };
    const point = event => {
      const [x, y] = place(event);
      if (x >= 0 && x < 1 && y >= 0 && y < 1) go(Math.floor(y * rows), Math.floor(x * columns));
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("focus", () => { if (area.matches(":focus-visible")) go(at[0], at[1]); });
    area.addEventListener("keydown", event => {
      if (event.key === "Escape") return leave();
      const step = STEPS[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(at[0] + step[0], at[1] + step[1]);
    });
    area.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") leave(); });
  }

  const within = element => event => {
    const box = element.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };

  // Matrices of heads: the figures stand there already, here is what they say when pointed at

  for (const figure of all("[data-matrix]")) {
    const {box: [left, top, width, height], values} = data.matrices[figure.dataset.matrix];
    const N = data.names.length, readout = find(".readout", figure), whole = within(find("svg", figure));
    const place = event => { const [x, y] = whole(event); return [(x - left) / width, (y - top) / height]; };
    const show = (i, j) => {
      const value = values[i * N + j];
      readout.textContent = `${data.names[i]}, ${data.names[j]}: ${value === null ? "no number" : value.toFixed(3)}`;
    };
    explore(find(".across", figure), N, N, place, show, () => { readout.textContent = ""; });
  }

  if (!data.patterns) return;

  // Weights

  const T = data.labels.length;

  // Little-endian 16-bit numbers in units of 1 / 65535; of a causal pattern the part up to the diagonal.
  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), out = new Float32Array(T * T);
    let at = 0;
    for (let t = 0; t < T; t++) {
      const end = data.causal ? t + 1 : T;
      for (let s = 0; s < end; s++, at += 2) out[t * T + s] = (bytes[at] | (bytes[at + 1] << 8)) / 65535;
    }
    return out;
  }

  const masked = (t, s) => data.causal && s > t;
  const palette = Uint8Array.from(data.colours.match(/../g), pair => parseInt(pair, 16));

  // One pixel a cell; the page stretches it. Masked cells stay transparent.
  function paint(canvas, pattern) {
    canvas.width = canvas.height = T;
    const context = canvas.getContext("2d"), image = context.createImageData(T, T);
    for (let i = 0; i < T * T; i++) {
      if (masked(Math.floor(i / T), i % T)) continue;
      const entry = 3 * Math.round(255 * Math.sqrt(pattern[i]));
      image.data.set([palette[entry], palette[entry + 1], palette[entry + 2], 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  const token = i => `“${data.labels[i]}” (${i})`;
  const weight = w => w.toFixed(4);
  let pattern; // of the chosen head

  // The large map

  const map = find("#map"), sheet = find(".sheet", map), cells = find(".cells", map), cursor = find(".cursor", map);
  const rulers = [find(".queries-ruler", map), find(".keys-ruler", map)];
  const marks = rulers.map(ruler => data.labels.map(label => add(ruler, label)));
  marks[1].forEach((mark, i) => mark.style.setProperty("--column", i));
  map.style.setProperty("--tokens", T);

  // Cells as large as there is room for; labels of columns upright where they are no wider than their cell.
  function fit() {
    const room = find(".sheet-room", map).clientWidth - rulers[0].offsetWidth;
    const cell = Math.max(11, Math.min(36, Math.floor(Math.min(room, 0.7 * innerHeight) / T)));
    map.style.setProperty("--cell", `${cell}px`);
    marks[1].forEach(mark => mark.classList.remove("upright"));
    const wide = marks[1].map(mark => mark.offsetWidth);
    marks[1].forEach((mark, i) => mark.classList.toggle("upright", wide[i] <= cell));
    map.style.setProperty("--above", `${6 + Math.max(cell, ...wide.filter(w => w > cell))}px`);
  }

  function showCell(t, s) {
    const w = masked(t, s) ? "masked, the key comes later" : weight(pattern[t * T + s]);
    find(".readout", map).textContent = `query ${token(t)} → key ${token(s)}: ${w}`;
    marks.forEach((labels, axis) => labels.forEach((mark, i) => mark.classList.toggle("at", i === [t, s][axis])));
    cursor.hidden = false;
    cursor.style.setProperty("--row", t);
    cursor.style.setProperty("--column", s);
    cursor.firstChild.textContent = masked(t, s) ? "" : weight(pattern[t * T + s]);
    cursor.className = `cursor${t > T / 2 ? " low" : ""}${s > T / 2 ? " right" : ""}`;
    if (document.activeElement === cells && cells.matches(":focus-visible")) reveal(t, s);
  }

  // Scrolls the sheet, and nothing else, until the cell is clear of the rulers.
  function reveal(t, s) {
    const cell = cells.offsetWidth / T, at = [t * cell, s * cell];
    const room = [sheet.clientHeight - rulers[1].offsetHeight, sheet.clientWidth - rulers[0].offsetWidth];
    const inView = (from, now, space) => Math.min(from, Math.max(now, from + cell - space));
    sheet.scrollTo(inView(at[1], sheet.scrollLeft, room[1]), inView(at[0], sheet.scrollTop, room[0]));
  }

  function leaveMap() {
    cursor.hidden = true;
    find(".readout", map).textContent = "";
    marks.flat().forEach(mark => mark.classList.remove("at"));
  }

  // Lines

  const threads = find("#threads"), lines = find("svg", threads);
  const columns = [find(".queries", threads), find(".keys-list", threads)];
  const tokens = columns.map(column => data.labels.map((label, i) => {
    const row = add(column, "", "token");
    add(row, label, "label");
    add(row, String(i), "position");
    return row;
  }));
  let kept = null; // the token whose lines were asked to stay: [0 for a query or 1 for a key, position]

  // All lines, or those of one query (side 0) or of one key (side 1).
  function drawLines(side = null, at = null) {
    lines.setAttribute("viewBox", `0 0 100 ${T}`);
    lines.replaceChildren();
    const strength = [new Float32Array(T), new Float32Array(T)];
    for (let t = 0; t < T; t++) {
      for (let s = 0; s < T; s++) {
        const w = pattern[t * T + s];
        if (side !== null && [t, s][side] !== at) continue;
        strength[0][t] = Math.max(strength[0][t], w);
        strength[1][s] = Math.max(strength[1][s], w);
        if (w < FAINTEST) continue;
        const line = lines.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
        for (const [name, value] of [["x1", 0], ["y1", t + 0.5], ["x2", 100], ["y2", s + 0.5], ["stroke-opacity", w.toFixed(3)]])
          line.setAttribute(name, value);
      }
    }
    tokens.forEach((rows, own) => rows.forEach((row, i) => {
      row.classList.toggle("at", own === side && i === at);
      row.style.setProperty("--weight", side === null || own === side ? 0 : strength[own][i].toFixed(3));
    }));
    find(".readout", threads).textContent = side === null ? "" : strongest(side, at, strength[1 - side]);
  }

  function strongest(side, at, weights) {
    const found = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter(i => weights[i] > 0);
    const said = found.map(i => `${token(i)} ${weight(weights[i])}`).join(", ");
    return side ? `key ${token(at)} ← queries ${said || "none"}` : `query ${token(at)} → keys ${said}`;
  }

  const restLines = () => kept ? drawLines(kept[0], kept[1]) : drawLines();
  columns.forEach((column, side) => {
    explore(column, T, 1, within(column), row => drawLines(side, row), () => { if (kept) kept = null; drawLines(); });
    column.addEventListener("click", event => {
      const row = Math.floor(within(column)(event)[1] * T);
      kept = kept && kept[0] === side && kept[1] === row ? null : [side, row];
      restLines();
    });
  });

  // The chosen head

  const cards = all(".card"), selects = all(".chooser select");

  function choose(index) {
    pattern = unpack(data.patterns[index]);
    for (const select of selects) select.value = String(index);
    cards.forEach((card, i) => card.setAttribute("aria-pressed", String(i === index)));
    paint(find("canvas", cells), pattern);
    leaveMap();
    restLines();
  }

  for (const select of selects) {
    data.titles.forEach((title, i) => {
      const option = select.appendChild(document.createElement("option"));
      option.value = String(i);
      option.textContent = title;
    });
    select.addEventListener("change", () => choose(Number(select.value)));
  }
  for (const button of all(".chooser button")) {
    button.addEventListener("click", () => {
      const N = cards.length;
      choose((Number(selects[0].value) + Number(button.dataset.step) + N) % N);
    });
  }
  cards.forEach((card, i) => {
    paint(find("canvas", card), unpack(data.patterns[i]));
    card.addEventListener("click", () => {
      choose(i);
      map.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start"});
    });
  });

  document.body.classList.toggle("fine", T > 64);
  for (const hidden of all(".atlas, .sheet-panel, .chooser")) hidden.hidden = false;
  threads.style.setProperty("--tokens", T);
  fit();
  addEventListener("resize", fit);
  explore(cells, T, T, within(cells), showCell, leaveMap);
  choose(data.first);
})();
