// Lines of several runs over one x axis.

const HEIGHT = 280;
const PRINT_HEIGHT = 215;
const TABLE_ROWS = 60;
const MANY = 10; // with more lines, the tooltip names only those nearest to the pointer

class LineChart extends Chart {
  constructor(host, spec, state) {
    super(host, spec, state);
    const base = spec.yBase || "linear";
    if (spec.yLog !== false) this.addSwitch("log y", "y", "log", base);
    if (spec.xLog !== false) this.addSwitch("log x", "x", spec.xLogKind || "log", "linear");
    if (spec.layers) {
      const count = Math.max(...state.runs.map((run) => run.layers));
      const each = [...Array(count).keys()].map((layer) => [String(layer), `layer ${layer}`]);
      this.addChoice("layer", "layer", [
        ["mean", "mean over layers"],
        ["every", "every layer"],
        ...each,
      ]);
    }
  }

  draw() {
    const width = this.begin();
    this.series = this.visibleRuns()
      .flatMap((run) => this.spec.series(run, this.options))
      .filter((s) => s.x.length);
    this.image = null;
    if (!this.series.length)
      return this.empty(
        this.state.visible.size
          ? this.spec.empty || "Nothing was recorded."
          : "All runs are hidden.",
      );
    const reference = this.spec.reference ? this.spec.reference(this.series) : null;
    const all = reference ? [...this.series, reference] : this.series;
    this.scaleX = makeScale(
      this.options.x,
      all.flatMap((s) => s.x),
      { fromZero: this.spec.xFromZero !== false },
    );
    const ys = all.flatMap((s) => s.y);
    this.scaleY = makeScale(this.options.y, ys, { fromZero: this.spec.yFromZero, pad: 0.04 });
    const height = this.state.printWidth ? PRINT_HEIGHT : HEIGHT;
    this.box = { left: 52, top: 24, width: width - 52 - 16, height: height - 24 - 42 };
    this.image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": this.summary(),
    });
    const labels = {
      x: this.spec.xLabel,
      y: this.spec.yLabel,
      xFormat: this.spec.xFormat,
      yFormat: this.spec.yFormat,
    };
    this.image.append(axes(this.box, this.scaleX, this.scaleY, labels));
    if (reference) this.image.append(svg("path", { class: "reference", d: this.path(reference) }));
    for (const line of this.series) this.drawSeries(line);
    this.crosshair = svg("line", {
      class: "crosshair",
      y1: this.box.top,
      y2: this.box.top + this.box.height,
      visibility: "hidden",
    });
    this.image.append(this.crosshair);
    for (const event of ["pointermove", "pointerdown"])
      this.image.addEventListener(event, (e) => this.point(e));
    this.plot.append(this.image);
    return this.end();
  }

  pixel(line, i) {
    return [
      this.box.left + this.scaleX.at(line.x[i]) * this.box.width,
      this.box.top + (1 - this.scaleY.at(line.y[i])) * this.box.height,
    ];
  }

  path(line) {
    const parts = [];
    for (let i = 0; i < line.x.length; i++) {
      const [x, y] = this.pixel(line, i).map((v) => v.toFixed(1));
      parts.push(i === 0 ? `M${x},${y}` : line.step ? `H${x}V${y}` : `L${x},${y}`);
    }
    return parts.join("");
  }

  drawSeries(line) {
    const stroke = strokeOf(line.run.index);
    const noisy = this.isNoisy(line);
    if (noisy) stroke["stroke-dasharray"] = null;
    const faded = line.opacity ? { opacity: line.opacity } : {};
    this.image.append(
      svg("path", {
        class: line.fine || noisy ? "series fine" : "series",
        d: this.path(line),
        "data-run": line.run.index,
        ...stroke,
        ...faded,
      }),
    );
    if (!line.markers && line.x.length > 1) return;
    for (let i = 0; i < line.x.length; i++) {
      const [cx, cy] = this.pixel(line, i);
      this.image.append(svg("circle", { cx, cy, r: 3.5, fill: stroke.stroke }));
    }
  }

  // Dashes are not recognisable on a line that goes up and down all the time.
  isNoisy(line) {
    let climbed = 0;
    for (let i = 1; i < line.y.length; i++) {
      climbed += Math.abs(this.scaleY.at(line.y[i]) - this.scaleY.at(line.y[i - 1]));
    }
    return line.x.length > 100 && climbed > 10;
  }

  point(event) {
    const bounds = this.image.getBoundingClientRect();
    const zoom = bounds.width / this.image.viewBox.baseVal.width;
    const [x, y] = [(event.clientX - bounds.left) / zoom, (event.clientY - bounds.top) / zoom];
    const { snapped, value } = this.snap(x);
    this.crosshair.setAttribute("x1", snapped);
    this.crosshair.setAttribute("x2", snapped);
    this.crosshair.setAttribute("visibility", "visible");
    const found = this.series
      .filter((line) => value >= line.x[0] && value <= line.x[line.x.length - 1])
      .map((line) => ({ line, i: nearest(line.x, value) }))
      .map((hit) => ({ ...hit, far: Math.abs(this.pixel(hit.line, hit.i)[1] - y) }));
    if (this.series.length > MANY) found.sort((a, b) => a.far - b.far).splice(5);
    const title = `${(this.spec.xFormat || format)(value)} ${this.spec.xUnit}`;
    this.showTooltip(
      snapped * zoom,
      y * zoom,
      title,
      found.map((hit) => this.tooltipRow(hit, value)),
    );
  }

  // The recorded x nearest to the pointer, in pixels and as a value.
  snap(x) {
    const target = this.scaleX.value((x - this.box.left) / this.box.width);
    let best = null;
    for (const line of this.series) {
      const value = line.x[nearest(line.x, target)];
      const snapped = this.box.left + this.scaleX.at(value) * this.box.width;
      if (!best || Math.abs(snapped - x) < Math.abs(best.snapped - x)) best = { snapped, value };
    }
    return best;
  }

  hideTooltip() {
    super.hideTooltip();
    if (this.crosshair) this.crosshair.setAttribute("visibility", "hidden");
  }

  tooltipRow({ line, i }, value) {
    const elsewhere = line.x[i] === value ? "" : ` at ${(this.spec.xFormat || format)(line.x[i])}`;
    const text = `${(this.spec.yFormat || format)(line.y[i])}${this.spec.yUnit || ""}`;
    return html(
      "div",
      {},
      swatch(strokeOf(line.run.index)),
      html("span", {}, line.name + elsewhere),
      html("b", {}, text),
    );
  }

  summary() {
    const yFormat = this.spec.yFormat || format;
    const parts = this.series
      .slice(0, MANY)
      .map(
        (line) =>
          `${line.name}: from ${yFormat(line.y[0])} to ${yFormat(line.y[line.y.length - 1])}`,
      );
    return `${this.spec.title}. ${this.spec.yLabel} against ${this.spec.xLabel}. ${parts.join("; ")}.`;
  }

  rows() {
    const lines = this.series || [];
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const every = Math.ceil(xs.length / TABLE_ROWS);
    const chosen = xs.filter((_, i) => i % every === 0 || i === xs.length - 1);
    const columns = lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
    const head = [this.spec.xLabel, ...lines.map((line) => line.name)];
    const cell = (column, x) =>
      column.has(x) ? (this.spec.yFormat || format)(column.get(x)) : "–";
    return [
      head,
      ...chosen.map((x) => [
        (this.spec.xFormat || format)(x),
        ...columns.map((column) => cell(column, x)),
      ]),
    ];
  }
}
