"use strict";
// Sorts and filters tables, shows what a mark of a chart says, and switches light and dark. Nothing is fetched.
(() => {
  const theme = document.getElementById("theme");
  const modes = ["auto", "light", "dark"];
  const remembered = () => { try { return localStorage.getItem("bitplan-theme"); } catch { return null; } };
  const setTheme = (mode) => {
    if (mode === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", mode);
    theme.textContent = `Theme: ${mode}`;
    theme.dataset.mode = mode;
    try { localStorage.setItem("bitplan-theme", mode); } catch { /* a page from a file may have no storage */ }
  };
  theme.hidden = false;
  setTheme(modes.includes(remembered()) ? remembered() : "auto");
  theme.addEventListener("click", () => setTheme(modes[(modes.indexOf(theme.dataset.mode) + 1) % modes.length]));

  const LIMIT = 500;
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  for (const table of document.querySelectorAll("[data-table]")) {
    const body = table.querySelector("tbody");
    const headings = [...table.querySelectorAll("th")];
    const rows = [...body.rows].map((row, place) => ({ row, place, text: row.textContent.toLowerCase() }));
    const empty = table.querySelector("[data-empty]");
    const more = table.querySelector("[data-more]");
    let sorted = rows;
    let fits = () => true;
    let limit = LIMIT;
    // Only so many rows are in the page at a time: laying out thousands takes seconds on a phone.
    const show = () => {
      const found = sorted.filter(fits);
      body.replaceChildren(...found.slice(0, limit).map((item) => item.row));
      empty.hidden = found.length > 0;
      more.hidden = found.length <= limit;
      more.textContent = `Show all ${found.length.toLocaleString("en")} rows`;
      return found.length;
    };
    more.addEventListener("click", () => { limit = Infinity; show(); });
    addEventListener("beforeprint", () => { const before = limit; limit = Infinity; show(); limit = before; });
    addEventListener("afterprint", show);

    const key = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
    };
    const compare = (a, b) => {
      if (typeof a === "number" && typeof b === "number") return a - b;
      if (typeof a === "number") return -1;
      if (typeof b === "number") return 1;
      return order.compare(a, b);
    };
    headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const first = heading.classList.contains("n") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const next = now === "none" ? first : now === first ? second : "none";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const keyed = rows.map((item) => ({ item, key: key(item.row, column) }));
      if (next !== "none") keyed.sort((a, b) => sign * compare(a.key, b.key) || a.item.place - b.item.place);
      sorted = keyed.map(({ item }) => item);
      show();
    }));

    const tools = table.querySelector(".tools");
    if (tools) {
      tools.hidden = false;
      const search = tools.querySelector("input");
      const lists = [...tools.querySelectorAll("select")];
      const shownCount = tools.querySelector("output");
      const filter = () => {
        const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
        const wanted = lists.filter((list) => list.value).map((list) => [Number(list.dataset.column), list.value]);
        fits = ({ row, text }) => words.every((word) => text.includes(word))
          && wanted.every(([column, value]) => row.cells[column].textContent === value);
        const shown = show();
        const all = rows.length.toLocaleString("en");
        shownCount.textContent = shown === rows.length ? `${all} rows` : `${shown.toLocaleString("en")} of ${all} rows`;
      };
      let waiting = 0;
      search.addEventListener("input", () => {
        cancelAnimationFrame(waiting);
        waiting = requestAnimationFrame(filter);
      });
      lists.forEach((list) => list.addEventListener("change", filter));
    }
    if (rows.length > LIMIT) show();
  }

  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(Math.max(4, x + 12), innerWidth - width - 4);
    const top = y + 16 + height > innerHeight ? y - height - 10 : y + 16;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  const heats = new WeakMap();
  const heatText = (box, event) => {
    if (!heats.has(box)) heats.set(box, JSON.parse(box.dataset.heat));
    const heat = heats.get(box);
    const svg = box.querySelector("svg");
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const column = Math.floor((place.x - heat.left) / heat.width);
    const row = Math.floor((place.y - heat.top) / heat.pitch);
    const cell = heat.rows[row]?.[column];
    if (!cell || cell.length === 0) return null;
    const score = cell[0] === null ? "no score" : `sensitivity ${cell[0]}`;
    return `${heat.blocks[row]}, step ${heat.steps[column].toLocaleString("en")}: ${score}, ${cell[1]}`;
  };
  const point = (event) => {
    const mark = event.target.closest?.("[data-tip]");
    const heat = event.target.closest?.("[data-heat]");
    const text = mark ? mark.dataset.tip : heat ? heatText(heat, event) : null;
    if (text) show(text, event.clientX, event.clientY);
    else tip.hidden = true;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);
})();
