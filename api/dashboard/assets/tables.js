// Long tables can be searched, sorted by any column, and saved as CSV. Without this file they are plain tables.
"use strict";
(function () {
  const LONG = 6; // rows from which a table can be searched and sorted
  const UNITS = {
    "\u00b5s": 1e-6, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, "%": 0.01,
    B: 1, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, GiB: 2 ** 30,
  };
  const kept = new Map(); // what was asked of a table, by its caption: parts of a page are replaced

  // The text of a cell, without the small print below it.
  function words(cell) {
    const copy = cell.cloneNode(true);
    for (const small of copy.querySelectorAll("small")) small.prepend(" ");
    return copy.textContent.trim().replace(/\s+/g, " ");
  }

  // A number with its unit in the unit's base, such as seconds; NaN for words.
  function amount(text) {
    const found = /^(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([^\s\d/]*)/.exec(text);
    if (!found) return NaN;
    const unit = found[2] === "" ? 1 : UNITS[found[2]];
    return unit === undefined ? NaN : Number(found[1].replaceAll(",", "")) * unit;
  }

  // Numbers first and by size, then words by letters, then empty cells.
  function compare(a, b) {
    const one = amount(a), other = amount(b);
    if (!isNaN(one) && !isNaN(other)) return one - other;
    if (isNaN(one) !== isNaN(other)) return isNaN(one) ? 1 : -1;
    if (!a !== !b) return a ? -1 : 1;
    return a.localeCompare(b, "en", { numeric: true });
  }

  function sort(table, asked) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const total = (row) => row.classList.contains("sum");
    const rows = [...body.rows].filter((row) => !total(row));
    rows.sort((a, b) => compare(words(a.cells[asked.column]), words(b.cells[asked.column])));
    if (asked.down) rows.reverse();
    body.append(...rows, ...[...body.rows].filter(total)); // sums stay below
    heads.forEach((head, i) => {
      if (i !== asked.column) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", asked.down ? "descending" : "ascending");
    });
  }

  function search(table, asked, told) {
    const wanted = asked.text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    told.textContent = wanted.length ? shown + " of " + table.tBodies[0].rows.length + " rows" : "";
  }

  // A cell for CSV: quoted, and never a formula where a spreadsheet opens it.
  function cell(text) {
    const safe = /^[=+@\t]|^-(?![\d.])/.test(text) ? "'" + text : text;
    return '"' + safe.replaceAll('"', '""') + '"';
  }

  function csv(table) {
    const lines = [], above = []; // above: cells that reach down into the next rows
    for (const row of table.rows) {
      const line = [];
      let cells = [...row.cells];
      for (let i = 0; cells.length || (above[i] && above[i].rows); i += 1) {
        if (above[i] && above[i].rows) {
          above[i].rows -= 1;
          line.push(above[i].text);
          continue;
        }
        const next = cells.shift(), text = cell(words(next));
        above[i] = { text: text, rows: next.rowSpan - 1 };
        line.push(text);
      }
      if (!row.hidden) lines.push(line.join(","));
    }
    return lines.join("\r\n") + "\r\n";
  }

  function save(table, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
    link.download = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60) + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function button(text, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  }

  function equip(table) {
    if (table.dataset.equipped || !table.tHead || !table.tBodies[0]) return;
    table.dataset.equipped = "yes";
    const name = table.caption ? table.caption.textContent : "table";
    const tools = document.createElement("div");
    tools.className = "tools";
    const plain = !table.tBodies[0].querySelector("[rowspan]");
    if (plain && table.tBodies[0].rows.length >= LONG) {
      const asked = kept.get(name) || { text: "", column: -1, down: false };
      kept.set(name, asked);
      const field = document.createElement("input");
      const told = document.createElement("span");
      field.type = "search";
      field.value = asked.text;
      field.placeholder = "Search";
      field.setAttribute("aria-label", "Search in: " + name);
      told.setAttribute("role", "status");
      field.addEventListener("input", () => {
        asked.text = field.value;
        search(table, asked, told);
      });
      tools.append(field, told);
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        const turn = button(head.textContent, () => {
          asked.down = asked.column === column && !asked.down;
          asked.column = column;
          sort(table, asked);
        });
        turn.className = "sort";
        head.replaceChildren(turn);
      });
      if (asked.column >= 0) sort(table, asked);
      if (asked.text) search(table, asked, told);
    }
    const take = button("CSV", () => save(table, name));
    take.className = "quiet small";
    take.setAttribute("aria-label", "Save as CSV: " + name);
    tools.append(take);
    const shown = table.closest(".scroll") || table, box = document.createElement("div");
    shown.before(box); // one box, so that columns of a page keep their number
    box.append(tools, shown);
  }

  const equipAll = (part) => part.querySelectorAll("main table").forEach(equip);
  document.addEventListener("DOMContentLoaded", () => equipAll(document));
  document.addEventListener("htmx:load", () => equipAll(document));
  // Who types into a search field is not disturbed by a refresh.
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.activeElement && document.activeElement.type === "search") event.preventDefault();
  });
})();
