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
  constructor(spec, state) {
    this.spec = spec;
    this.state = state;
    this.controls = html("div", { class: "controls" });
    this.plot = html("div", { class: "plot" });
    this.tooltip = html("div", { class: "tooltip", hidden: "" });
    const name = { "aria-label": `${spec.title}, values` };
    this.table = html("div", { class: "table", tabindex: 0, role: "region", ...name });
    this.details = html("details", {}, html("summary", {}, "Values as a table"), this.table);
    this.details.addEventListener("toggle", () => this.fillTable());
    const note = spec.note ? html("p", {}, spec.note) : null;
    const caption = html("figcaption", {}, html("h3", {}, spec.title), note);
    const parts = [caption, this.controls, this.plot, this.details];
    const figure = html("figure", { class: "chart", id: `chart-${spec.id}` }, ...parts);
    document.getElementById(spec.section).append(figure);
    // After a tap the values stay visible until the next tap elsewhere.
    this.plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.hideTooltip();
    });
    document.addEventListener("pointerdown", (event) => {
      if (!this.plot.contains(event.target)) this.hideTooltip();
    });
  }

  // A button that sets an option to `on`, and to linear when it is pressed again.
  addSwitch(label, option, on) {
    const button = html("button", { type: "button" }, label);
    const show = () => button.setAttribute("aria-pressed", String(this.options[option] === on));
    button.addEventListener("click", () => {
      this.options[option] = this.options[option] === on ? "linear" : on;
      show();
      this.draw();
    });
    show();
    this.controls.append(button);
  }

  visibleRuns() {
    return this.state.runs.filter((run) => this.state.visible.has(run));
  }

  // Starts a drawing: empties the plot and takes the page's width, at least that of a phone.
  begin() {
    this.hideTooltip();
    this.width = Math.max(240, this.state.printWidth || this.plot.clientWidth);
    this.plot.replaceChildren();
  }

  // Adds a picture of that width; `point` is given the pointer's place in it.
  addPicture(height, label, point) {
    const viewBox = `0 0 ${this.width} ${height}`;
    const picture = svg("svg", { viewBox, role: "img", "aria-label": label });
    for (const event of ["pointermove", "pointerdown"]) {
      picture.addEventListener(event, ({ clientX, clientY }) => {
        const { left, top } = picture.getBoundingClientRect();
        point(clientX - left, clientY - top);
      });
    }
    this.plot.append(picture);
    return picture;
  }

  end() {
    this.plot.append(this.tooltip);
    this.fillTable();
  }

  empty(text) {
    this.plot.append(html("p", {}, text));
    this.end();
  }

  // `x` and `y` are pixels of a picture; the tooltip stays inside the plot.
  showTooltip(picture, x, y, title, rows) {
    this.tooltip.replaceChildren(html("strong", {}, title), ...rows);
    this.tooltip.hidden = false;
    this.tooltip.style.left = "0"; // its width is measured where it has room
    const { offsetWidth, offsetHeight } = this.tooltip;
    const { clientWidth, clientHeight } = this.plot;
    const inside = (at, size, whole) => `${Math.max(0, Math.min(at, whole - size))}px`;
    const left = x + 14 + offsetWidth > clientWidth ? x - 14 - offsetWidth : x + 14;
    const above = picture.getBoundingClientRect().top - this.plot.getBoundingClientRect().top;
    this.tooltip.style.left = inside(left, offsetWidth, clientWidth);
    this.tooltip.style.top = inside(above + y - offsetHeight / 2, offsetHeight, clientHeight);
  }

  hideTooltip() {
    this.tooltip.hidden = true;
  }

  fillTable() {
    if (!this.details.open) return;
    const [head, ...rows] = this.rows();
    const line = ([name, ...cells]) =>
      html("tr", {}, html("th", { scope: "row" }, name), ...cells.map((c) => html("td", {}, c)));
    const top = html("tr", {}, ...head.map((cell) => html("th", { scope: "col" }, cell)));
    this.table.replaceChildren(
      html("table", {}, html("thead", {}, top), html("tbody", {}, ...rows.map(line))),
    );
  }
}

// Axes with gridlines around the box {left, top, width, height}. `x` and `y` have a scale, a label
// and how to write a value.
function axes(box, x, y) {
  const group = svg("g", {});
  const bottom = box.top + box.height;
  const right = box.left + box.width;
  const line = (x1, x2, y1, y2) => svg("line", { class: "gridline", x1, x2, y1, y2 });
  const text = (content, at) => svg("text", at, content);
  const yTicks = y.scale.ticks(Math.max(2, Math.floor(box.height / 32)));
  tickTexts(yTicks, y.write).forEach((content, i) => {
    const at = bottom - y.scale.at(yTicks[i]) * box.height;
    group.append(line(box.left, right, at, at));
    group.append(text(content, { x: box.left - 6, y: at + 4, "text-anchor": "end" }));
  });
  const xTicks = x.scale.ticks(Math.max(2, Math.floor(box.width / 62)));
  tickTexts(xTicks, x.write).forEach((content, i) => {
    const at = box.left + x.scale.at(xTicks[i]) * box.width;
    group.append(line(at, at, box.top, bottom));
    group.append(text(content, { x: at, y: bottom + 16, "text-anchor": "middle" }));
  });
  const d = `M${box.left},${box.top}V${bottom}H${right}`;
  const middle = { x: box.left + box.width / 2, y: bottom + 34, "text-anchor": "middle" };
  group.append(
    svg("path", { class: "axis", fill: "none", d }),
    text(y.label, { x: 2, y: 12 }),
    text(x.label, middle),
  );
  return group;
}
