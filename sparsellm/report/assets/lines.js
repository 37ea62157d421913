// Lines of several runs over one x axis.

const HEIGHT = 280;
const PRINT_HEIGHT = 215;
const TABLE_ROWS = 60;
const MANY = 10; // with more lines, the tooltip names only those nearest to the pointer

// How lines are drawn that are not plain.
const STYLES = {
  loss: { thin: true },
  predicted_ffn_ms: { thin: true },
  predicted_dense_ms: { thin: true },
  validation: { dots: true },
  evaluation: { dots: true },
  evaluation_limited: { dots: true },
  distribution: { steps: true },
};

// `spec.lines` has the names of the lines among a run's and what follows the run's label; `spec.x`
// and `spec.y` have a label, a kind of scale (linear if none is named) and how to write a value.
class LineChart extends Chart {
  constructor(spec, state) {
    super(spec, state);
    this.x = { write: format, log: "log", ...spec.x };
    this.y = { write: format, ...spec.y };
    this.options = { x: spec.x.kind || "linear", y: spec.y.kind || "linear", layer: "mean" };
    this.addSwitch("log y", "y", "log");
    this.addSwitch("log x", "x", this.x.log);
    if (spec.layers) this.addLayers(Math.max(...state.runs.map((run) => run.layers)));
  }

  addLayers(count) {
    const each = [...Array(count).keys()].map((layer) => [layer, `layer ${layer}`]);
    const values = [["mean", "mean over layers"], ["every", "every layer"], ...each];
    const choices = values.map(([value, text]) => html("option", { value }, text));
    const select = html("select", { "aria-label": `${this.spec.title}: layer` }, ...choices);
    select.addEventListener("change", () => {
      this.options.layer = select.value;
      this.draw();
    });
    this.controls.append(select);
  }

  // A run's lines; where it has one for each layer, that of the chosen layer or their mean.
  linesOf(run) {
    return Object.entries(this.spec.lines).flatMap(([name, suffix]) => {
      const { x, y, layers } = run.lines[name];
      const line = { run, name: run.label + suffix, x, y, ...STYLES[name] };
      if (!layers) return [line];
      const { layer } = this.options;
      if (layer === "mean") return [{ ...line, y: x.map((_, i) => mean(layers.map((l) => l[i]))) }];
      const fade = (l) => (layer === "every" ? 1 - (0.7 * l) / Math.max(layers.length - 1, 1) : 1);
      return layers
        .map((values, l) => ({
          ...line,
          name: `${run.label}, layer ${l}`,
          y: values,
          opacity: fade(l),
        }))
        .filter((_, l) => layer === "every" || l === Number(layer));
    });
  }

  draw() {
    this.begin();
    const runs = this.visibleRuns();
    this.lines = runs.flatMap((run) => this.linesOf(run)).filter((line) => line.x.length);
    if (!runs.length) return this.empty("All runs are hidden.");
    if (!this.lines.length) return this.empty(this.spec.empty || "Nothing was recorded.");
    const [{ x }] = this.lines;
    const all = this.spec.diagonal ? [...this.lines, { x, y: x }] : this.lines;
    const values = (axis) => all.flatMap((line) => line[axis]);
    this.x.scale = makeScale(this.options.x, values("x"), { fromZero: true });
    this.y.scale = makeScale(this.options.y, values("y"), { fromZero: this.y.fromZero, pad: 0.04 });
    const height = this.state.printWidth ? PRINT_HEIGHT : HEIGHT;
    this.box = { left: 52, top: 24, width: this.width - 52 - 16, height: height - 24 - 42 };
    const picture = this.addPicture(height, this.summary(), (...at) => this.point(picture, ...at));
    picture.append(axes(this.box, this.x, this.y));
    if (this.spec.diagonal)
      picture.append(svg("path", { class: "reference", d: this.path({ x, y: x }) }));
    for (const line of this.lines) picture.append(...this.marks(line));
    const { top } = this.box;
    const ends = { y1: top, y2: top + this.box.height, visibility: "hidden" };
    this.crosshair = svg("line", { class: "crosshair", ...ends });
    picture.append(this.crosshair);
    return this.end();
  }

  pixel(line, i) {
    return [
      this.box.left + this.x.scale.at(line.x[i]) * this.box.width,
      this.box.top + (1 - this.y.scale.at(line.y[i])) * this.box.height,
    ];
  }

  path(line) {
    const parts = line.x.map((_, i) => {
      const [x, y] = this.pixel(line, i).map((v) => v.toFixed(1));
      return i === 0 ? `M${x},${y}` : line.steps ? `H${x}V${y}` : `L${x},${y}`;
    });
    return parts.join("");
  }

  marks(line) {
    const { index } = line.run;
    const noisy = this.isNoisy(line);
    const stroke = { ...strokeOf(index), ...(noisy ? { "stroke-dasharray": null } : {}) };
    const kind = line.thin || noisy ? "series fine" : "series";
    const { opacity = null } = line;
    const d = this.path(line);
    const path = svg("path", { class: kind, d, opacity, "data-run": index, ...stroke });
    if (!line.dots && line.x.length > 1) return [path];
    const dots = line.x.map((_, i) => {
      const [cx, cy] = this.pixel(line, i);
      return svg("circle", { cx, cy, r: 3.5, fill: stroke.stroke });
    });
    return [path, ...dots];
  }

  // Dashes are not recognisable on a line that goes up and down all the time.
  isNoisy(line) {
    const places = line.y.map((y) => this.y.scale.at(y));
    const climbed = places.slice(1).reduce((sum, at, i) => sum + Math.abs(at - places[i]), 0);
    return places.length > 100 && climbed > 10;
  }

  // Shows the values at the recorded x that is nearest to the pointer.
  point(picture, pointerX, pointerY) {
    const target = this.x.scale.value((pointerX - this.box.left) / this.box.width);
    const at = (value) => this.box.left + this.x.scale.at(value) * this.box.width;
    const far = (value) => Math.abs(at(value) - pointerX);
    const value = this.lines
      .map((line) => line.x[nearest(line.x, target)])
      .reduce((best, other) => (far(other) < far(best) ? other : best));
    const ends = { x1: at(value), x2: at(value), visibility: "visible" };
    fill(this.crosshair, ends, []);
    const found = this.lines
      .filter((line) => value >= line.x[0] && value <= line.x[line.x.length - 1])
      .map((line) => ({ line, i: nearest(line.x, value) }));
    if (this.lines.length > MANY) {
      const away = ({ line, i }) => Math.abs(this.pixel(line, i)[1] - pointerY);
      found.sort((a, b) => away(a) - away(b)).splice(5);
    }
    const rows = found.map(({ line, i }) => {
      const elsewhere = line.x[i] === value ? "" : ` at ${this.x.write(line.x[i])}`;
      const text = html("b", {}, this.y.write(line.y[i]));
      return html("div", {}, swatch(strokeOf(line.run.index)), line.name + elsewhere, text);
    });
    this.showTooltip(picture, at(value), pointerY, `${this.x.write(value)} ${this.x.unit}`, rows);
  }

  hideTooltip() {
    super.hideTooltip();
    this.crosshair?.setAttribute("visibility", "hidden");
  }

  summary() {
    const ends = ({ name, y }) =>
      `${name}: from ${this.y.write(y[0])} to ${this.y.write(y[y.length - 1])}`;
    const lines = this.lines.slice(0, MANY).map(ends).join("; ");
    return `${this.spec.title}. ${this.y.label} against ${this.x.label}. ${lines}.`;
  }

  rows() {
    const xs = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const every = Math.ceil(xs.length / TABLE_ROWS);
    const chosen = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
    const columns = this.lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
    const cell = (column, x) => (column.has(x) ? this.y.write(column.get(x)) : "–");
    return [
      [this.x.label, ...this.lines.map((line) => line.name)],
      ...chosen.map((x) => [this.x.write(x), ...columns.map((column) => cell(column, x))]),
    ];
  }
}
