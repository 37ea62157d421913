// Layers over training tokens: one image per run, all on one colour scale.

const VIRIDIS = [
  "440154",
  "472d7b",
  "3b528b",
  "2c728e",
  "21918c",
  "28ae80",
  "5ec962",
  "addc30",
  "fde725",
].map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function colorAt(share) {
  const at = Math.max(0, Math.min(share, 1)) * (VIRIDIS.length - 1);
  const i = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[i].map((low, c) => Math.round(low + (VIRIDIS[i + 1][c] - low) * (at - i)));
}

class HeatChart extends Chart {
  constructor(host, spec, state) {
    super(host, spec, state);
    this.addSwitch("log colours", "color", "log", "linear");
  }

  draw() {
    const width = this.begin();
    const runs = this.visibleRuns();
    if (!runs.length) return this.empty("All runs are hidden.");
    const values = runs.flatMap((run) => this.spec.values(run).flat());
    const log = this.options.color === "log";
    this.scale = makeScale(
      this.options.color,
      log ? values.map((v) => Math.max(v, this.spec.floor)) : values,
      { fromZero: true },
    );
    const x = makeScale("linear", [0, ...runs.flatMap((run) => run.heat.x)]);
    runs.forEach((run, i) => {
      if (this.state.runs.length > 1) this.plot.append(html("h4", {}, run.label));
      this.drawRun(run, x, width, i === runs.length - 1);
    });
    this.plot.append(this.colorBar(width));
    return this.end();
  }

  drawRun(run, x, width, isLast) {
    const rows = Math.max(96, Math.min(run.layers * 12, 240));
    const box = { left: 52, top: 20, width: width - 52 - 16, height: rows };
    const height = box.top + rows + (isLast ? 42 : 22);
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": this.summary(run),
    });
    const end = x.at(run.heat.x[run.heat.x.length - 1]) * box.width;
    // Layer l covers l - ½ to l + ½; the first layer is at the bottom.
    const y = makeScale("linear", [], { domain: [-0.5, run.layers - 0.5] });
    y.ticks = () =>
      linearTicks(0, run.layers - 1, Math.min(rows / 20, run.layers)).filter(Number.isInteger);
    image.append(axes(box, x, y, { x: isLast ? "training tokens" : "", y: "layer" }));
    image.append(
      svg("image", {
        class: "pixels",
        href: this.pixels(run, x, end, box.width),
        x: box.left,
        y: box.top,
        width: end,
        height: rows,
        preserveAspectRatio: "none",
      }),
    );
    for (const event of ["pointermove", "pointerdown"]) {
      image.addEventListener(event, (e) => this.point(e, run, image, box, x));
    }
    this.plot.append(image);
  }

  // One pixel per layer and screen column; a column shows the nearest record.
  pixels(run, x, end, boxWidth) {
    const canvas = html("canvas", { width: Math.max(1, Math.round(end)), height: run.layers });
    const context = canvas.getContext("2d");
    const picture = context.createImageData(canvas.width, run.layers);
    const values = this.spec.values(run);
    for (let column = 0; column < canvas.width; column++) {
      const record = values[nearest(run.heat.x, x.value((column + 0.5) / boxWidth))];
      for (let layer = 0; layer < run.layers; layer++) {
        const at = 4 * ((run.layers - 1 - layer) * canvas.width + column);
        picture.data.set([...colorAt(this.scale.at(record[layer])), 255], at);
      }
    }
    context.putImageData(picture, 0, 0);
    return canvas.toDataURL();
  }

  colorBar(width) {
    const box = { left: 52, width: width - 52 - 16 };
    const id = `colors-${this.spec.id}`;
    const stops = VIRIDIS.map((rgb, i) =>
      svg("stop", { offset: i / (VIRIDIS.length - 1), "stop-color": `rgb(${rgb})` }),
    );
    const bar = svg("svg", {
      viewBox: `0 0 ${width} 50`,
      role: "img",
      "aria-label": `Colours: ${this.spec.unit}, ${this.text(this.scale.low)} to ${this.text(this.scale.high)}`,
    });
    bar.append(svg("defs", {}, svg("linearGradient", { id }, ...stops)));
    bar.append(svg("text", { x: 2, y: 12 }, this.spec.unit));
    bar.append(
      svg("rect", { x: box.left, y: 18, width: box.width, height: 10, fill: `url(#${id})` }),
    );
    for (const value of this.scale.ticks(Math.floor(box.width / 62))) {
      bar.append(
        svg(
          "text",
          { x: box.left + this.scale.at(value) * box.width, y: 43, "text-anchor": "middle" },
          this.text(value),
        ),
      );
    }
    return bar;
  }

  text(value) {
    return (this.spec.format || format)(value);
  }

  point(event, run, image, box, x) {
    const bounds = image.getBoundingClientRect();
    const zoom = bounds.width / image.viewBox.baseVal.width;
    const [px, py] = [
      (event.clientX - bounds.left) / zoom - box.left,
      (event.clientY - bounds.top) / zoom - box.top,
    ];
    const layer = run.layers - 1 - Math.floor((py / box.height) * run.layers);
    const tokens = x.value(px / box.width);
    const past = tokens > run.heat.x[run.heat.x.length - 1];
    if (px < 0 || past || layer < 0 || layer >= run.layers) return this.hideTooltip();
    const column = nearest(run.heat.x, tokens);
    const value = html("b", {}, this.text(this.spec.values(run)[column][layer]));
    const row = html("div", {}, html("span", {}, `${run.label}, layer ${layer}`), value);
    const y = bounds.top - this.plot.getBoundingClientRect().top + (py + box.top) * zoom;
    return this.showTooltip((px + box.left) * zoom, y, `${format(run.heat.x[column])} tokens`, [
      row,
    ]);
  }

  summary(run) {
    const values = this.spec.values(run);
    const [low, high] = extent(values[values.length - 1]);
    return `${this.spec.title}, ${run.label}: ${run.layers} layers over ${format(run.heat.x[run.heat.x.length - 1])} training tokens. At the end ${this.text(low)} to ${this.text(high)} (${this.spec.unit}).`;
  }

  // Rows are layers, columns five records.
  rows() {
    const head = ["run and layer"];
    const lines = [];
    for (const run of this.visibleRuns()) {
      const last = run.heat.x.length - 1;
      const chosen = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last)))];
      lines.push([`${run.label}, at tokens`, ...chosen.map((i) => format(run.heat.x[i]))]);
      for (let layer = 0; layer < run.layers; layer++) {
        lines.push([
          `layer ${layer}`,
          ...chosen.map((i) => this.text(this.spec.values(run)[i][layer])),
        ]);
      }
    }
    return [head, ...lines];
  }
}
