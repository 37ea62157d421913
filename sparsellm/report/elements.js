// Building blocks of the page: elements, a chart's frame, its controls, tooltip and table.

const SVG = "http://www.w3.org/2000/svg";
// Dashes tell runs apart in addition to colour, also on black-and-white prints.
const DASHES = ["", "7 3", "2 2", "9 3 2 3", "12 4", "4 4", "1 3", "9 2 2 2 2 2"];
const COLORS = 8;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);
const html = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

function strokeOf(index) {
  // After eight runs the colours begin again with other dashes.
  const dash = DASHES[(index + Math.floor(index / COLORS)) % DASHES.length];
  return { stroke: `var(--run-${index % COLORS})`, "stroke-dasharray": dash || null };
}

function swatch(attributes) {
  const line = svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, "stroke-width": 3, ...attributes });
  return svg("svg", { width: 26, height: 12, "aria-hidden": "true" }, line);
}

// A figure with title, note, controls, plot and collapsed table; `draw` fills `plot` at its width.
class Chart {
  constructor(host, spec, state) {
    this.spec = spec;
    this.state = state;
    this.options = { ...spec.options };
    this.controls = html("div", { class: "controls" });
    this.plot = html("div", { class: "plot" });
    this.tooltip = html("div", { class: "tooltip", hidden: "" });
    this.table = html("div", {
      class: "table",
      tabindex: 0,
      role: "region",
      "aria-label": `${spec.title}, values`,
    });
    this.details = html("details", {}, html("summary", {}, "Values as a table"), this.table);
    this.details.addEventListener("toggle", () => this.fillTable());
    const caption = html(
      "figcaption",
      {},
      html("h3", {}, spec.title),
      spec.note ? html("p", {}, spec.note) : null,
    );
    host.append(
      html(
        "figure",
        { class: "chart", id: `chart-${spec.id}` },
        caption,
        this.controls,
        this.plot,
        this.details,
      ),
    );
    // After a tap the values stay visible until the next tap elsewhere.
    this.plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.hideTooltip();
    });
    document.addEventListener("pointerdown", (event) => {
      if (!this.plot.contains(event.target)) this.hideTooltip();
    });
  }

  addSwitch(label, option, on, off) {
    const button = html(
      "button",
      { type: "button", "aria-pressed": String(this.options[option] === on) },
      label,
    );
    button.addEventListener("click", () => {
      this.options[option] = this.options[option] === on ? off : on;
      button.setAttribute("aria-pressed", String(this.options[option] === on));
      this.draw();
    });
    this.controls.append(button);
  }

  addChoice(label, option, values) {
    const choices = values.map(([value, text]) => html("option", { value }, text));
    const select = html("select", { "aria-label": `${this.spec.title}: ${label}` }, ...choices);
    select.value = this.options[option];
    select.addEventListener("change", () => {
      this.options[option] = select.value;
      this.draw();
    });
    this.controls.append(select);
  }

  visibleRuns() {
    return this.state.runs.filter((run) => this.state.visible.has(run.index));
  }

  // Starts a drawing: empties the plot and takes the page's width, at least that of a phone.
  begin() {
    this.hideTooltip();
    const width = Math.max(240, Math.floor(this.state.printWidth || this.plot.clientWidth || 480));
    this.plot.replaceChildren();
    return width;
  }

  end() {
    this.plot.append(this.tooltip);
    this.fillTable();
  }

  empty(text) {
    this.plot.append(html("p", {}, text));
    this.end();
  }

  // `x` and `y` are pixels of the plot; the tooltip stays inside it.
  showTooltip(x, y, title, rows) {
    this.tooltip.replaceChildren(html("strong", {}, title), ...rows);
    this.tooltip.hidden = false;
    this.tooltip.style.left = "0"; // its width is measured where it has room
    const { offsetWidth: width, offsetHeight: height } = this.tooltip;
    const left = x + 14 + width > this.plot.clientWidth ? x - 14 - width : x + 14;
    this.tooltip.style.left = `${Math.max(0, Math.min(left, this.plot.clientWidth - width))}px`;
    this.tooltip.style.top = `${Math.max(0, Math.min(y - height / 2, this.plot.clientHeight - height))}px`;
  }

  hideTooltip() {
    this.tooltip.hidden = true;
  }

  fillTable() {
    if (!this.details.open) return;
    const [head, ...rows] = this.rows();
    const line = (cells) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, cells[0]),
        ...cells.slice(1).map((c) => html("td", {}, c)),
      );
    const top = html("tr", {}, ...head.map((cell) => html("th", { scope: "col" }, cell)));
    this.table.replaceChildren(
      html("table", {}, html("thead", {}, top), html("tbody", {}, ...rows.map(line))),
    );
  }
}

// Axes with gridlines and labels around the box {left, top, width, height}.
function axes(box, x, y, labels) {
  const group = svg("g", {});
  const bottom = box.top + box.height;
  const ys = y.ticks(Math.max(2, Math.floor(box.height / 32)));
  const yTexts = tickTexts(ys, labels.yFormat);
  for (const [i, value] of ys.entries()) {
    const at = bottom - y.at(value) * box.height;
    group.append(
      svg("line", { class: "gridline", x1: box.left, x2: box.left + box.width, y1: at, y2: at }),
    );
    group.append(svg("text", { x: box.left - 6, y: at + 4, "text-anchor": "end" }, yTexts[i]));
  }
  const xs = x.ticks(Math.max(2, Math.floor(box.width / 62)));
  const xTexts = tickTexts(xs, labels.xFormat);
  for (const [i, value] of xs.entries()) {
    const at = box.left + x.at(value) * box.width;
    group.append(svg("line", { class: "gridline", x1: at, x2: at, y1: box.top, y2: bottom }));
    group.append(svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, xTexts[i]));
  }
  group.append(
    svg("path", {
      class: "axis",
      fill: "none",
      d: `M${box.left},${box.top}V${bottom}H${box.left + box.width}`,
    }),
  );
  group.append(svg("text", { class: "y-label", x: 2, y: 12 }, labels.y));
  group.append(
    svg(
      "text",
      { class: "x-label", x: box.left + box.width / 2, y: bottom + 34, "text-anchor": "middle" },
      labels.x,
    ),
  );
  return group;
}
