// Layers over training tokens: one image per run, all on one colour scale.

const VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
  .split(" ")
  .map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function colorAt(share) {
  const at = Math.max(0, Math.min(share, 1)) * (VIRIDIS.length - 1);
  const i = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[i].map((low, c) => Math.round(low + (VIRIDIS[i + 1][c] - low) * (at - i)));
}

// `spec.metric` names the values among a run's, a list of layers for each of `run.heat.x`.
class HeatChart extends Chart {
  constructor(spec, state) {
    super(spec, state);
    this.options = { color: spec.scale };
    this.addSwitch("log colours", "color", "log");
  }

  draw() {
    this.begin();
    const runs = this.visibleRuns();
    if (!runs.length) return this.empty("All runs are hidden.");
    const { color } = this.options;
    const least = color === "log" ? this.spec.floor : -Infinity;
    const values = runs.flatMap((run) => this.valuesOf(run).flat()).map((v) => Math.max(v, least));
    this.scale = makeScale(color, values, { fromZero: true });
    const x = makeScale("linear", [0, ...runs.flatMap((run) => run.heat.x)]);
    runs.forEach((run, i) => {
      if (this.state.runs.length > 1) this.plot.append(html("h4", {}, run.label));
      this.drawRun(run, x, i === runs.length - 1);
    });
    this.drawColors();
    return this.end();
  }

  valuesOf(run) {
    return run.heat[this.spec.metric];
  }

  drawRun(run, x, isLast) {
    const height = Math.max(96, Math.min(run.layers * 12, 240));
    const box = { left: 52, top: 20, width: this.width - 52 - 16, height };
    const whole = box.top + height + (isLast ? 42 : 22);
    const point = (...at) => this.point(picture, run, box, x, ...at);
    const picture = this.addPicture(whole, this.summary(run), point);
    // Layer l covers l - ½ to l + ½; the first layer is at the bottom.
    const y = makeScale("linear", [], { domain: [-0.5, run.layers - 0.5] });
    const most = Math.min(height / 20, run.layers);
    y.ticks = () => linearTicks(0, run.layers - 1, most).filter(Number.isInteger);
    const xLabel = isLast ? "training tokens" : "";
    picture.append(axes(box, { scale: x, label: xLabel }, { scale: y, label: "layer" }));
    const width = x.at(run.heat.x[run.heat.x.length - 1]) * box.width;
    const href = this.pixels(run, x, width, box.width);
    const place = { x: box.left, y: box.top, width, height, preserveAspectRatio: "none" };
    picture.append(svg("image", { class: "pixels", href, ...place }));
  }

  // One pixel per layer and screen column; a column shows the nearest record.
  pixels(run, x, width, boxWidth) {
    const canvas = html("canvas", { width: Math.max(1, Math.round(width)), height: run.layers });
    const context = canvas.getContext("2d");
    const picture = context.createImageData(canvas.width, run.layers);
    const values = this.valuesOf(run);
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

  drawColors() {
    const { low, high } = this.scale;
    const { unit, write } = this.spec;
    const id = `colors-${this.spec.id}`;
    const [left, width] = [52, this.width - 52 - 16];
    const stops = VIRIDIS.map((rgb, i) =>
      svg("stop", { offset: i / (VIRIDIS.length - 1), "stop-color": `rgb(${rgb})` }),
    );
    const label = `Colours: ${unit}, ${write(low)} to ${write(high)}`;
    const bar = this.addPicture(50, label, () => this.hideTooltip());
    bar.append(
      svg("defs", {}, svg("linearGradient", { id }, ...stops)),
      svg("text", { x: 2, y: 12 }, unit),
      svg("rect", { x: left, y: 18, width, height: 10, fill: `url(#${id})` }),
    );
    for (const value of this.scale.ticks(Math.floor(width / 62))) {
      const at = { x: left + this.scale.at(value) * width, y: 43, "text-anchor": "middle" };
      bar.append(svg("text", at, write(value)));
    }
  }

  point(picture, run, box, x, pointerX, pointerY) {
    const layer = run.layers - 1 - Math.floor(((pointerY - box.top) / box.height) * run.layers);
    const tokens = x.value((pointerX - box.left) / box.width);
    const past = tokens < 0 || tokens > run.heat.x[run.heat.x.length - 1];
    if (past || layer < 0 || layer >= run.layers) return this.hideTooltip();
    const column = nearest(run.heat.x, tokens);
    const value = html("b", {}, this.spec.write(this.valuesOf(run)[column][layer]));
    const row = html("div", {}, `${run.label}, layer ${layer}`, value);
    const title = `${format(run.heat.x[column])} tokens`;
    return this.showTooltip(picture, pointerX, pointerY, title, [row]);
  }

  summary(run) {
    const { title, unit, write } = this.spec;
    const values = this.valuesOf(run);
    const [low, high] = extent(values[values.length - 1]).map((value) => write(value));
    const tokens = format(run.heat.x[run.heat.x.length - 1]);
    const what = `${title}, ${run.label}: ${run.layers} layers over ${tokens} training tokens`;
    return `${what}. At the end ${low} to ${high} (${unit}).`;
  }

  // Rows are layers, columns five records.
  rows() {
    const lines = this.visibleRuns().flatMap((run) => {
      const last = run.heat.x.length - 1;
      const chosen = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last)))];
      const layers = [...Array(run.layers).keys()].map((layer) => [
        `layer ${layer}`,
        ...chosen.map((i) => this.spec.write(this.valuesOf(run)[i][layer])),
      ]);
      return [[`${run.label}, at tokens`, ...chosen.map((i) => format(run.heat.x[i]))], ...layers];
    });
    return [["run and layer"], ...lines];
  }
}
